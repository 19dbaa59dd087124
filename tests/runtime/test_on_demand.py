"""Programs that a trace cannot find, and programs that leave their schedule: right values all the same.

A case is a loss that also gets the step and the rank, as Python state would: what they change, no trace can
know. The reference runs it for every rank in one process, on whole parameters, where units are plain functions.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import tree
from tests.shared import parity
from tests.shared.bad import Raised, alike, attempt
from tests.shared.parity import Run
from tests.shared.virtual import Job
from tests.shared.workers import Pools
from tests.shared.zoo import cut

STEPS, ROWS, WORLDS = 5, 12, (1, 2, 3)
SGD = {"lr": 0.05, "momentum": 0.9}
NAMES = ("one", "two", "three", "four")


@fs.unit
def layer(p: Any, x: Tensor) -> Tensor:
    """A residual step."""
    return x + torch.tanh(F.linear(x, p["w"], p["b"]))


partly = fs.unit(lambda p, x, biased: torch.tanh(F.linear(x, p["w"], p["b"] if biased else None)))


def start() -> dict[str, Any]:
    """The start values."""
    draw = torch.Generator().manual_seed(11)
    return {
        name: {"w": torch.randn(6, 6, generator=draw) / 2, "b": torch.randn(6, generator=draw) / 5}
        for name in (*NAMES, "spare")
    }


def batch_of(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 6, generator=draw)
    return {"x": x, "y": torch.cos(x), "flag": torch.tensor(step in (1, 2, 4)), "mask": (x[:, 0] > -0.3).float()}


Now = SimpleNamespace
"""What Python state says: ``step`` and ``rank``."""


def _through(p: Any, b: Any, names: Any) -> Tensor:
    x = b["x"]
    for name in names:
        x = layer(p[name], x)
    return F.mse_loss(x, b["y"])


def flag_in_batch(p: Any, b: Any, now: Now) -> Tensor:
    """Tensor values decide whether a unit runs."""
    return _through(p, b, NAMES if b["flag"] else ("one", "two", "four"))


def flag_on_ranks(p: Any, b: Any, now: Now) -> Tensor:
    """A value is read, and changes nothing of the order."""
    return _through(p, b, NAMES) * (2.0 if b["flag"].item() else 1.0)


def other_order(p: Any, b: Any, now: Now) -> Tensor:
    """From the third step on the units come in another order."""
    return _through(p, b, NAMES if now.step < 2 else reversed(NAMES))


def every_other(p: Any, b: Any, now: Now) -> Tensor:
    """The order changes at every step."""
    return _through(p, b, NAMES if now.step % 2 else reversed(NAMES))


def deeper(p: Any, b: Any, now: Now) -> Tensor:
    """A unit is called more and more often."""
    return _through(p, b, (*NAMES, *["two"] * now.step, "three"))


def new_unit(p: Any, b: Any, now: Now) -> Tensor:
    """A unit that was never called before is."""
    return _through(p, b, (*NAMES, "spare") if now.step == 2 else NAMES)


def new_glue(p: Any, b: Any, now: Now) -> Tensor:
    """Code between units reads what only a unit read before."""
    extra = p["two"]["w"].square().sum() + p["spare"]["b"].sum() if now.step == 2 else 0.0
    return _through(p, b, NAMES) + extra


def skipped_on_one_later(p: Any, b: Any, now: Now) -> Tensor:
    """One rank leaves the first and the last unit out, once."""
    return _through(p, b, ("two", "three") if (now.rank, now.step) == (0, 2) else NAMES)


def skipped_in_backward(p: Any, b: Any, now: Now) -> Tensor:
    """On one rank a unit gets no gradient."""
    x = layer(p["one"], b["x"])
    y = layer(p["two"], x.detach() if now.rank == 0 and now.step % 2 else x)
    return F.mse_loss(layer(p["three"], y), b["y"])


def leaves_unused_on_ranks(p: Any, b: Any, now: Now) -> Tensor:
    """Some leaves of a unit, and one between units, have no gradient on some ranks in some steps, or on all in one."""
    x = layer(p["one"], b["x"])
    x = partly(p["two"], x, now.step != 3 and (now.rank + now.step) % 2 == 0)  # whether it reads its bias
    bias = p["spare"]["b"]
    return F.mse_loss(x + (bias.detach() if now.rank == 0 and now.step in (1, 2) else bias), b["y"])


def checkpointed(p: Any, b: Any, now: Now) -> Tensor:
    """Units under activation checkpointing, one of them with code around it."""
    x = layer(p["one"], b["x"])
    x = checkpoint(lambda x: layer(p["two"], x), x, use_reentrant=False)
    x = checkpoint(lambda x: 2 * layer(p["four"], layer(p["three"], x * x)), x, use_reentrant=False)
    return F.mse_loss(layer(p["one"], x), b["y"])


def checkpointed_on_demand(p: Any, b: Any, now: Now) -> Tensor:
    """The same, found on demand."""
    return checkpointed(p, b, now) * (2.0 if b["flag"].item() else 1.0)


def checkpointed_later(p: Any, b: Any, now: Now) -> Tensor:
    """From the third step on, the backward calls two units again."""

    def inner(x: Tensor) -> Tensor:
        return layer(p["two"], layer(p["one"], x))

    x = checkpoint(inner, b["x"], use_reentrant=False) if now.step >= 2 else inner(b["x"])
    return F.mse_loss(layer(p["four"], layer(p["three"], x)), b["y"])


def other_constant(p: Any, b: Any, now: Now) -> Tensor:
    """Code between units takes a value, and no gradient, of another leaf from step to step."""
    leaf = p["two"]["w"] if now.step % 2 else p["three"]["w"]
    return _through(p, b, NAMES) * (1 + 0.1 * leaf.detach().norm())


def weighted(p: Any, b: Any, now: Now) -> Any:
    """A mean over unequal counts, on demand."""
    x = b["x"]
    for name in NAMES if b["flag"] else ("one", "two", "four"):
        x = layer(p[name], x)
    losses = (x - b["y"]).square().mean(1) * b["mask"]
    return fs.Mean(losses.sum(), b["mask"].sum())


def frozen_pass(p: Any, b: Any, now: Now) -> Tensor:
    """A unit runs with and without gradients."""
    with torch.no_grad():
        target = layer(p["two"], layer(p["one"], b["y"]))
    x = layer(p["two"], b["x"]) if b["flag"] else layer(p["three"], b["x"])
    return F.mse_loss(x, target)


CASES: dict[str, Callable[[Any, Any, Now], Any]] = {
    case.__name__: case
    for case in (
        flag_in_batch,
        flag_on_ranks,
        other_order,
        every_other,
        deeper,
        new_unit,
        new_glue,
        skipped_on_one_later,
        skipped_in_backward,
        leaves_unused_on_ranks,
        checkpointed,
        checkpointed_on_demand,
        checkpointed_later,
        other_constant,
        weighted,
        frozen_pass,
    )
}

SCHEDULED: dict[str, tuple[bool, ...]] = {
    # Whether each step ran on a schedule to the end, op by op as it says.
    "flag_in_batch": (False, False, True, False, True),
    "flag_on_ranks": (False, True, True, True, True),
    "other_order": (True, True, False, True, True),
    "leaves_unused_on_ranks": (True,) * 5,
    "every_other": (True, False, False, False, False),
    "new_unit": (True, True, False, False, False),
    "checkpointed": (True,) * 5,
    "checkpointed_on_demand": (False, True, True, True, True),
}
"""A step that leaves out a call keeps to the schedule, and its record misses that call."""


@dataclass(frozen=True)
class Config:
    """How a step is made."""

    accumulate: int = 1
    prefetch: int = 1
    reshard: bool = True
    update: str = "deferred"
    clip: float | None = None


CONFIGS = (
    Config(),
    Config(prefetch=0, clip=0.3),
    Config(prefetch=2, reshard=False),
    Config(accumulate=2),
    Config(update="in_backward"),
)


def setup(mesh: fs.Mesh) -> tuple[fs.Plan, Any, Any]:
    """The plan, the optimizer and the first state."""
    plan = fs.make_plan(start(), mesh, [(".*", fs.fsdp("shard"))], units=(*NAMES, "spare"))
    rule = fs.optim.sgd(**SGD)
    return plan, rule, fs.init_state(plan, rule, params=start())


def train(name: str, configs: Sequence[Config]) -> list[tuple[Run, tuple[bool, ...]]]:
    """On a rank: a case under each configuration."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        return [_train(CASES[name], mesh, config) for config in configs]


def _possible(name: str, config: Config) -> bool:
    # Updates in the backward cannot be taken back, and cannot wait for a global count.
    return config.update == "deferred" or name not in ("checkpointed_later", "weighted")


def _train(case: Any, mesh: fs.Mesh, config: Config) -> tuple[Run, tuple[bool, ...]]:
    plan, rule, state = setup(mesh)
    now = Now(step=0, rank=mesh.rank)
    step = fs.make_train_step(
        lambda p, b: case(p, b, now),
        rule,
        plan,
        accumulate=config.accumulate,
        clip_norm=config.clip,
        schedule=fs.Policy(config.prefetch, reshard=config.reshard, update=config.update),
        debug=True,
    )
    scheduled = []

    def batches() -> Iterator[dict[str, Tensor]]:
        for number in range(STEPS):
            now.step = number
            yield cut(batch_of(number), mesh.rank, mesh.size)
            scheduled.append(_kept(step))

    run, _ = parity.sharded(step, state, plan, batches(), scheduled_from=None)
    return run, tuple(scheduled)


def _kept(step: fs.types.TrainStep) -> bool:
    """Whether the last step ran its schedule; one that gathers on demand has none."""
    try:
        return step.record == step.schedule.ops
    except fs.errors.PlanError:
        return False


def _expected(name: str, world: int, config: Config) -> Run:
    own = {path: leaf.clone().requires_grad_() for path, leaf in tree.paths(start())}

    def backward(number: int) -> float:
        return parity.backward(_global_loss(CASES[name], tree.nest(own), number, world, config.accumulate))

    return parity.plain(own, torch.optim.SGD(own.values(), **SGD), backward, STEPS, config.clip)


def _global_loss(case: Any, params: Any, number: int, world: int, accumulate: int) -> Tensor:
    parts = []
    for rank in range(world):
        mine = cut(batch_of(number), rank, world)
        parts += [case(params, cut(mine, i, accumulate), Now(step=number, rank=rank)) for i in range(accumulate)]
    if isinstance(parts[0], fs.Mean):
        return sum(part.total for part in parts) / sum(part.count for part in parts)
    return sum(parts) / len(parts)


def check(job: Job, name: str, world: int, configs: Sequence[Config]) -> None:
    """Train a case under each configuration that it can have, and compare with one plain process."""
    configs = [config for config in configs if _possible(name, config)]
    ranks = job(world).run(train, name, configs)
    problems = []
    for number, config in enumerate(configs):
        runs = [rank[number] for rank in ranks]
        found = parity.differences([run for run, _ in runs], _expected(name, world, config))
        problems += [f"{config}: {line}" for line in found]
        for rank, (_, scheduled) in enumerate(runs):
            if name in SCHEDULED and scheduled != SCHEDULED[name] and config.accumulate == 1:
                problems.append(f"{config} rank {rank}: scheduled {scheduled}")
    assert not problems, "\n".join(problems)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*left their schedule")
@pytest.mark.parametrize(("number", "name"), [*enumerate(CASES)])
def test_values_are_those_of_one_process(job: Job, number: int, name: str) -> None:
    """On two of the three worlds, on each of them under a third of the configurations."""
    for turn in (number, number + 1):
        check(job, name, WORLDS[turn % 3], CONFIGS[(number + turn) % 3 :: 3])


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_values_of_all_configurations(pool: Pools, world: int, name: str) -> None:
    check(pool, name, world, CONFIGS)


def refused(name: str) -> tuple[list[Raised | None], bool]:
    """On a rank: the errors of a case with updates in the backward, and whether parameters stayed."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, rule, state = setup(mesh)
        now = Now(step=0, rank=mesh.rank)
        step = fs.make_train_step(
            lambda p, b: CASES[name](p, b, now),
            rule,
            plan,
            schedule=fs.Policy(reduces=1, update="in_backward"),
            donate=False,
        )
        raised = []
        for now.step in range(3):
            batch = cut(batch_of(now.step), mesh.rank, mesh.size)
            raised.append(attempt(lambda b=batch: step(state, b)))  # type: ignore[misc]
        whole = dict(tree.paths(fs.unshard(state.params, plan)))
        return raised, all(torch.equal(leaf, whole[path]) for path, leaf in tree.paths(start()))


@pytest.mark.parametrize("world", [1, 2])
def test_updates_in_the_backward_cannot_divide_by_a_count(pool: Pools, world: int) -> None:
    for steps in zip(*(raised for raised, _ in pool(world).run(refused, "weighted")), strict=True):
        alike(list(steps), "LossError", ("fs.Mean", "update='deferred'"))


def test_updates_in_the_backward_cannot_be_taken_back(pool: Pools) -> None:
    ranks = pool(2).run(refused, "checkpointed_later")
    assert all(raised[:2] == [None, None] and kept for raised, kept in ranks)
    alike([raised[2] for raised, _ in ranks], "ScheduleError", ("left its schedule", "update='deferred'"))


def raising(mode: str) -> tuple[list[Raised | None], list[float]]:
    """On a rank: a step that fails among good ones; its error, and the losses."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, rule, state = setup(mesh)
        switch, losses = Now(mode=""), []

        def loss(p: Any, b: Any) -> Tensor:
            if switch.mode == "early":
                raise ValueError("no such batch")
            names = reversed(NAMES) if switch.mode == "order" else NAMES
            extra = ("spare",) if switch.mode == "extra" else ()
            value = _through(p, b, (*names, *extra))
            if switch.mode == "late":
                raise ValueError("no such batch")
            return value * (2.0 if b["flag"].item() else 1.0)

        step = fs.make_train_step(loss, rule, plan)
        raised = []
        for number in range(4):
            batch = cut(batch_of(number), mesh.rank, mesh.size)
            if mode and number in (0, 2):  # on demand, and on the schedule
                switch.mode = mode if mesh.rank == mesh.size - 1 else ""
                raised.append(attempt(lambda s=state, b=batch: step(s, b)))  # type: ignore[misc]
                switch.mode = ""
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
        return raised, losses


@pytest.mark.parametrize("mode", ["early", "late", "extra", "order"])
def test_ranks_that_part_get_an_error_and_go_on(pool: Pools, mode: str) -> None:
    undisturbed = pool(2).run(raising, "")
    disturbed = pool(2).run(raising, mode)
    for (_, want), (_, got) in zip(undisturbed, disturbed, strict=True):
        assert got == pytest.approx(want, abs=1e-6)
    for at in range(2):
        peer, own = (raised[at] for raised, _ in disturbed)
        if mode in ("early", "late"):
            assert own is not None and own.kinds[0] == "ValueError"
            assert peer is not None and "PeerError" in peer.kinds and "rank 1: ValueError: no such batch" in peer.text
        else:
            alike([peer, own], "ScheduleError", ("rank 0: ", "rank 1: ", "same order"))
