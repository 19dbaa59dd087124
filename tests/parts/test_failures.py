"""A step function that fails, anywhere and on any rank, leaves every state as it was on all ranks, and nothing hangs.

Each case makes a good step, one that fails, and two more good ones. These must equal, bit for bit, the steps of a run
without the failure.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.parts.after_failures import TIMEOUT, compared
from tests.parts.plain import batch, first, local, plan_on, second, whole
from tests.parts.ways import asking
from tests.shared.workers import Pools

POINTS = ("begin", "loss one", "between", "loss two", "after", "rule", "loss three", "end", "nan one", "nan two")
"""Where it fails: in passes, in the code around them, in an update that the step applies; or by gradients."""


@dataclass(frozen=True)
class Rule(fs.optim.sgd):
    """An update rule that fails when it is told to."""

    armed: ClassVar[list[str]] = []

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update, or fail before anything is written."""
        if self.armed:
            raise ValueError(f"injected in the {self.armed.pop()}")
        super().update(*args, **kwargs)


class Fault:
    """A failure that waits for its point."""

    point: str = ""

    def hit(self, point: str) -> None:
        """Fail here, if it is the point."""
        if point == self.point:
            self.point = ""
            raise ValueError(f"injected in {point}")

    def spoil(self, point: str, loss: Any) -> Any:
        """A loss that is nan here, if it is the point."""
        if point == self.point:
            self.point = ""
            return loss * torch.nan
        return loss


def make(fault: Fault, plan: fs.Plan, opt: Any) -> Callable[[Any, Any], Any]:
    """A step of two states: perturbed parameters, an update that the step reads, and one that waits."""

    def losing(fn: Any, number: str) -> Any:
        def loss(params: Any, batch: Any) -> Any:
            fault.hit(f"loss {number}")
            return fault.spoil(f"nan {number}", fn(params, batch))

        return fs.value_and_grad(loss, plan)

    one, two, three = losing(first, "one"), losing(second, "two"), losing(first, "three")
    update, clipped = fs.make_update(opt, plan), fs.make_update(opt, plan, clip_norm=0.1)

    def fn(states: Any, batch: Any) -> Any:
        fault.hit("begin")
        loss, grads = one(states["a"], batch)
        fault.hit("between")
        other, more = two(fs.tree.add(states["a"].params, grads, -0.01), batch)
        fault.hit("after")
        state, metrics = update(states["a"], fs.tree.add(grads, more))
        last, grads = three(state, batch)
        state, _ = clipped(state, grads)
        twin, _ = update(states["b"], more)
        fault.hit("end")
        return {"a": state, "b": twin}, {"losses": [loss, other, last], "norm": metrics.grad_norm}

    return fn


def run(points: Sequence[tuple[str, str]], how: str, gloo: bool) -> list[str]:
    """On a rank: what is not as it must be after failures at these points, each on one rank or on "all"."""
    out = []
    with fs.make_mesh((-1,), ("shard",), timeout=TIMEOUT, shared_memory=not gloo) as mesh, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*run one by one")
        plan, opt = plan_on(mesh), Rule(0.05, momentum=0.9)
        want = _steps(mesh, plan, opt, "", how)[0]
        for point, where in points:
            mine = where == "all" or int(where) == mesh.rank
            steps = functools.partial(_steps, mesh, plan, opt, point, how, mine)
            out += compared(f"{how}, {point} on {where}", steps, want, point, mine)
    return out


def _steps(
    mesh: fs.Mesh, plan: fs.Plan, opt: Any, point: str, how: str, mine: bool = False
) -> tuple[list[Tensor], BaseException | None]:
    """All numbers of four steps, and what the one that fails has raised."""
    fault, raised, told = Fault(), None, list[Tensor]()
    fn = make(fault, plan, opt)
    step = fs.make_step(asking(fn) if how == "asking" else fn, plan)
    states: Any = {name: fs.init_state(plan, opt, params=whole(n)) for n, name in enumerate("ab")}
    for number in range(3):
        if number == 1 and point:
            if mine:
                fault.point = point
                Rule.armed[:] = ["rule"] * (point == "rule")
            try:
                step(states, local(batch(number), plan))
            except Exception as error:
                raised = error
            fault.point = ""
            Rule.armed.clear()
        states, metrics = step(states, local(batch(number), plan))
        told += tree.leaves(metrics)
    for state in states.values():
        told += [x.clone() for x in tree.leaves((state.params, state.opt_state, torch.tensor(state.step)))]
    return told, raised


def check(pool: Pools, world: int, points: Sequence[tuple[str, str]], how: str, gloo: bool = False) -> None:
    """Run them and compare."""
    problems = [line for lines in pool(world).run(run, points, how, gloo, timeout=170.0) for line in lines]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(("how", "points"), [("step", POINTS[1::2]), ("asking", POINTS[::2])], ids=["step", "asking"])
def test_a_failure_of_one_rank_fails_the_step_of_all(pool: Pools, how: str, points: Sequence[str]) -> None:
    check(pool, 2, [(point, str(number // 2 % 2)) for number, point in enumerate(points)], how)


@pytest.mark.slow
@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("how", ["step", "asking"])
def test_a_failure_anywhere_leaves_every_state(pool: Pools, how: str, world: int, gloo: bool) -> None:
    check(pool, world, [(point, where) for point in POINTS for where in (*map(str, range(world)), "all")], how, gloo)
