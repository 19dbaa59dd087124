"""Ways to run a step function over parts, and what each of them must come to: the numbers of plain PyTorch."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.parts.plain import FUNCTIONS, Parts, Plain, PlainState, batch, close, local, plan_on, whole

STEPS = 4
FLAT, REPLICAS = ((-1,), ("shard",)), ((2, -1), ("replica", "shard"))
OPTS: dict[str, Any] = {"sgd": fs.optim.sgd(0.02, momentum=0.9), "adamw": fs.optim.adamw(0.01, weight_decay=0.0)}


@dataclass(frozen=True)
class Way:
    """How a step function runs.

    Attributes:
        name: the function.
        opt: the optimizer.
        how: "step" by ``fs.make_step``; "asking" by a step that no trace finds; "eager" without one.
        policy: arguments of ``fs.Policy``.
    """

    name: str
    opt: str
    how: str = "step"
    accumulate: int = 1
    remat: str | None = None
    compile: str | None = None
    reshard: bool | str = True
    prefetch: int = 1
    reduces: int = 1
    donate: bool = True
    debug: bool = False

    @property
    def policy(self) -> fs.Policy:
        """The policy of the step."""
        reshard = fs.keep(last=1) if isinstance(self.reshard, str) else self.reshard
        return fs.Policy(self.prefetch, self.reduces, reshard)

    def parts(self, plan: fs.Plan) -> Parts:
        """The parts that the function is given."""
        return Parts(
            plan, OPTS[self.opt], self.donate, accumulate=self.accumulate, remat=self.remat, compile=self.compile,
            debug=self.debug,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What came of some steps.

    Attributes:
        params: the whole parameters by path.
        told: the metrics of each step, as numbers.
        wrong: what was not as it must be: ops that ran beside the schedule, warnings.
    """

    params: dict[str, Tensor]
    told: list[list[float]]
    wrong: tuple[str, ...] = ()


def asking(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, looking at a value first: no trace finds its schedule."""

    def asks(state: Any, batch: Any) -> Any:
        rows = tree.leaves(tree.swap(lambda _: None, fs.TrainState, batch))
        if next(x for x in rows if isinstance(x, Tensor)).isnan().any():
            raise ValueError("nan in the batch")
        return fn(state, batch)

    return asks


def run(ways: Sequence[Way], axes: Any, steps: int = STEPS) -> list[Run]:
    """On a rank: run functions in their ways."""
    with fs.make_mesh(*axes) as mesh:
        return [steps_of(way, mesh, steps) for way in ways]


def steps_of(way: Way, mesh: fs.Mesh, steps: int) -> Run:
    """Some steps in one way."""
    plan = plan_on(mesh)
    parts = way.parts(plan)

    def fn(state: Any, batch: Any) -> Any:
        return FUNCTIONS[way.name](parts, state, batch)

    options: dict[str, Any] = {"schedule": way.policy, "donate": way.donate, "debug": way.debug}
    made = fs.make_step(asking(fn) if way.how == "asking" else fn, plan, **options)
    step = fn if way.how == "eager" else made
    state, told, wrong = fs.init_state(plan, OPTS[way.opt], params=whole()), [], list[str]()
    for number in range(steps):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, metrics = step(state, local(batch(number), plan))
        expected = 1 if way.how == "asking" and number == 0 else 0
        # The collector of garbage may come to what an earlier call of this process has dropped.
        ours = [w for w in caught if not issubclass(w.category, ResourceWarning)]
        said = [str(w.message) for w in ours if "torch.jit" not in str(w.message)]
        if len(said) != expected or not all("run one by one" in each for each in said):
            wrong.append(f"step {number} warns: {said}")
        if way.how == "step" and made.record != made.schedule.ops:
            wrong.append(f"step {number} leaves its schedule: {made.record}")
        told.append([float(x) for x in tree.leaves(metrics)])
    return Run(dict(tree.paths(fs.unshard(fs.settle(state).params, plan))), told, tuple(wrong))


@functools.cache
def expected(name: str, opt: str, steps: int) -> Run:
    """The same steps in plain PyTorch, on the global batch."""
    state, told = PlainState(whole()), []
    for number in range(steps):
        state, metrics = FUNCTIONS[name](Plain(OPTS[opt]), state, batch(number))
        told.append([float(x) for x in tree.leaves(metrics)])
    return Run(dict(tree.paths(state.params)), told)


def differences(runs: Sequence[Run], want: Run) -> list[str]:
    """How the runs of all ranks differ from plain PyTorch, or from each other."""
    found = [f"rank {rank}: {line}" for rank, each in enumerate(runs) for line in each.wrong]
    first = runs[0]
    found += [f"rank {rank} was told other numbers" for rank, each in enumerate(runs) if each.told != first.told]
    for step, (mine, theirs) in enumerate(zip(first.told, want.told, strict=True)):
        if len(mine) != len(theirs) or not all(map(close, mine, theirs)):
            found.append(f"step {step}: metrics {mine}, plain {theirs}")
            break
    for path, leaf in want.params.items():
        if not torch.allclose(first.params[path], leaf, rtol=1e-9, atol=1e-9):
            found.append(f"{path} differs by {(first.params[path] - leaf).abs().max():.1e}")
    return found


def problems(ways: Sequence[Way], ranks: Sequence[Sequence[Run]], steps: int = STEPS) -> list[str]:
    """What is wrong with the runs of all ranks, by way."""
    out = []
    for number, way in enumerate(ways):
        found = differences([runs[number] for runs in ranks], expected(way.name, way.opt, steps))
        out += [f"{way}\n    {line}" for line in found]
    return out
