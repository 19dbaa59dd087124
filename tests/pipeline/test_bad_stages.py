"""Pipelines that cannot be: each is an error on all ranks alike, before any of them sends something."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import fshard as fs
from fshard import tree
from fshard.pipeline import pipeline_runner
from tests.pipeline.programs import PROGRAMS, PipelineProgram
from tests.pipeline.staged_runs import StagedRun, adamw, made, on_rank
from tests.shared.bad import Raised, alike, attempt

Case = tuple[Callable[[fs.Mesh], Any], str, tuple[str, ...]]


def make(**options: Any) -> Callable[[fs.Mesh], Any]:
    """On a rank: make a step."""
    return lambda mesh: made(StagedRun(**options), mesh)


def train(**options: Any) -> Callable[[fs.Mesh], Any]:
    """On a rank: make a step and run it."""
    return lambda mesh: on_rank(StagedRun(**options), mesh, 1)


def given(
    loss: Callable[[Any], Any], program: PipelineProgram | None = None, **stages: Any
) -> Callable[[fs.Mesh], Any]:
    """On a rank: run a step of another loss function, made of that of a program."""

    def call(mesh: fs.Mesh) -> Any:
        one = program or PROGRAMS["stack"]()
        start = tree.nest({path: leaf.clone() for path, leaf in one.params.items()})
        cut = fs.Stages("stage", **stages)
        rules = [(".*", fs.fsdp("data"))]
        plan = fs.make_plan(start, mesh, rules, batch=fs.P("data"), units=one.units, stages=cut)
        step = fs.make_train_step(loss(one.make(fs.unit)), adamw(), plan, accumulate=4)
        return step(fs.init_state(plan, adamw(), params=start), plan.local_batch(one.batch(0)))

    return call


def parts(mesh: fs.Mesh) -> Any:
    """Microbatches of other shapes."""
    step, _, state, batch = made(StagedRun(accumulate=2), mesh)
    rows = batch(0)
    return step(state, fs.Microbatches(tuple([tree.map(lambda x: x[cut], rows) for cut in (slice(8), slice(8, 10))])))  # noqa: B023


def other_rows(mesh: fs.Mesh) -> Any:
    """Each stage is given rows of its own."""
    step, _, state, batch = made(StagedRun(), mesh)
    return step(state, batch(mesh.rank))


def other_lengths(mesh: fs.Mesh) -> Any:
    """Ranks are given rows of other lengths."""
    step, _, state, batch = made(StagedRun(), mesh)
    return step(state, {name: x[:, : 6 - mesh.rank] for name, x in batch(0).items()})


def doubling(rank: int) -> PipelineProgram:
    """A stack, on rank 0 with blocks that return twice the rows from their third real call on."""
    stack, calls = PROGRAMS["stack"](), [0]

    def make(unit: Any) -> Any:
        def mark(fn: Any) -> Any:
            def changing(p: Any, x: torch.Tensor) -> torch.Tensor:
                y: torch.Tensor = fn(p, x)
                if "up" in p and not isinstance(y, FakeTensor):
                    calls[0] += 1
                return torch.cat([y, y]) if not rank and "up" in p and calls[0] >= 3 else y

            return unit(changing)

        return stack.make(mark)

    return PipelineProgram(stack.params, make, stack.units, stack.batch)


def keeping(reads: int, inner: bool) -> PipelineProgram:
    """Four maps that put their result, or a value inside of them, into a list, of which the loss reads one."""
    made, kept = PROGRAMS["unet"](), list[torch.Tensor]()

    def make(unit: Any) -> Any:
        def keeps(p: Any, x: torch.Tensor) -> torch.Tensor:
            y = x @ p["w"]
            out = torch.tanh(y)
            kept.append(y if inner else out)
            return out

        one = unit(keeps)

        def loss_fn(params: Any, batch: Any) -> Any:
            kept.clear()
            x = batch["x"]
            for name in "abcd":
                x = one(params[name], x)
            return x.square().mean() + kept[reads].square().mean()

        return loss_fn

    return PipelineProgram({f"{name}.w": torch.eye(8) for name in "abcd"}, make, tuple("abcd"), made.batch)


def asks(inner: Any) -> Any:
    """A loss that values decide."""

    def loss_fn(params: Any, batch: Any) -> Any:
        found = inner(params, batch)
        return found if found.total.detach() > 0 else found

    return loss_fn


def twice(inner: Any) -> Any:
    """A tuple of tensors in the place of a loss."""
    return lambda params, batch: (inner(params, batch).total,) * 2


def penalty(inner: Any) -> Any:
    """A loss that reads leaves of all stages."""
    return lambda params, batch: inner(params, batch).total + params["embed"]["w"].square().sum()


def backwards() -> PipelineProgram:
    """Units that are called in another order than they have in the tree."""
    stack = PROGRAMS["stack"]()
    names = ["head.w", *[path for path in stack.params if path != "head.w"]]
    return PipelineProgram({name: stack.params[name] for name in names}, stack.make, stack.units, stack.batch)


def linked(between: Callable[[Any, torch.Tensor], torch.Tensor]) -> PipelineProgram:
    """Four maps; ``between(unit, x)`` gives the loss function's code around the last one."""
    made = PROGRAMS["unet"]()

    def make(unit: Any) -> Any:
        one = unit(lambda p, x: (y := x @ p["w"], y[:, :4]))

        def loss_fn(params: Any, batch: Any) -> Any:
            x, half = one(params["a"], batch["x"])
            x, _ = one(params["b"], x + 0 * half.sum())
            return between(lambda y: one(params["c"], y), x).square().mean()

        return loss_fn

    return PipelineProgram({f"{name}.w": torch.eye(8) for name in "abc"}, make, ("a", "b", "c"), made.batch)


def detached(unit: Any, x: torch.Tensor) -> torch.Tensor:
    """No gradient goes through the last unit."""
    return x + unit(x)[0].detach()


def shared_write(unit: Any, x: torch.Tensor) -> torch.Tensor:
    """Writes to the result of a unit of which another result is a part."""
    x.mul_(0.5)
    return unit(x)[0]


PLANS: dict[str, Case] = {
    "an empty stage": (make(stages={"cut": (6, 0)}), "PlanError", ("stage 1 has 0 units",)),
    "counts that do not sum": (make(stages={"cut": (2, 3)}), "PlanError", ("sum to 5", "6 units")),
    "three counts": (make(stages={"cut": (2, 2, 2)}), "PlanError", ("3 counts and 2 stages",)),
    "a glob of nothing": (make(stages={"cut": ("embed", "nope.*")}), "PlanError", ("'nope.*' matches no unit",)),
    "no way to cut": (make(stages={"cut": "even"}), "PlanError", ("'even'", '"balanced"')),
    "more stages than units": (make(stages={"chunks": 4}), "PlanError", ("8 stages and 6 units",)),
    "a data axis": (make(plan={"batch": fs.P(("stage", "data"))}), "PlanError", ("batch= names this axis",)),
    "flat over stages": (make(rules=((".*", fs.fsdp("stage")),)), "PlanError", ("'stage' is not gathered",)),
    "a dim over stages": (
        make(rules=((r"embed\.w", fs.P("stage")), (".*", fs.fsdp("data")))),
        "PlanError",
        ("specs name 'stage'", "embed.w"),
    ),
    "a leaf of a unit": (make(stages={"leaves": [(r"head\.w", 0)]}), "PlanError", ("no leaf outside of units",)),
    "no regular expression": (make(stages={"leaves": [("(", 0)]}), "PlanError", ("no pairs", "('(', 0)")),
    "no pair": (make(stages={"leaves": ["abc"]}), "PlanError", ("no pairs", "'abc'")),
    "no such stage": (make(program="tied", stages={"leaves": [("scale", 7)]}), "PlanError", ("7", "0 to 1")),
    "auto": (
        train(step={"schedule": fs.Auto(memory=9000)}),
        "PlanError",
        ("memory=9000", 'pipeline="1f1b"'),
    ),
    "an unknown order": (make(policy={"pipeline": "1f2b"}), "PlanError", ("1f2b", "the closest is '1f1b'")),
    "zbv in a loop": (make(policy={"pipeline": "zbv"}, stages={"chunks": 2}), "PlanError", ('placement="v"',)),
    "interleaved, alone": (make(policy={"pipeline": "interleaved"}), "PlanError", ("chunks=1", "gpipe")),
    "1f1b, two chunks": (make(policy={"pipeline": "1f1b"}, stages={"chunks": 2}), "PlanError", ("chunks=2",)),
}
STEPS: dict[str, Case] = {
    "rows that do not divide": (
        train(accumulate=5),
        "PlanError",
        ("microbatch 4 has other shapes", "int64 [4, 6]"),
    ),
    "too few rows": (train(accumulate=48), "BatchError", ("24 rows", "accumulate=48")),
    "unequal microbatches": (parts, "PlanError", ("microbatch 1 has other shapes", "batch['x'] int64 [2, 6]")),
    "rows of each stage": (other_rows, "BatchError", ("different rows", "plan.local_batch")),
    "a mean in the backward": (
        train(policy={"update": "in_backward"}, step={"clip_norm": None}),
        "LossError",
        ("fs.Mean", "in_backward"),
    ),
    "values": (given(asks), "PlanError", ("depends on values of tensors",)),
    "a pattern of no unit": (train(step={"remat": [("blcks.*", "all")]}), "PlanError", ("'blcks.*'", "match no unit")),
    "other lengths": (
        other_lengths,
        "ScheduleError",
        ("batch['x'] int64 [6, 5]", "batch['x'] int64 [6, 6]", "pad them"),
    ),
    "an edge whose shape changes": (
        lambda mesh: given(lambda inner: inner, doubling(mesh.rank))(mesh),
        "ShardError",
        ("goes over the edge changing(blocks.1):0>1", "float32 [24, 6, 8] in microbatch 1", "was float32 [6, 6, 8]"),
    ),
    "two losses": (given(twice), "LossError", ("a tuple of (Tensor, Tensor)", "(loss, aux dict)")),
    "a leaf of another stage": (given(penalty), "PlanError", ("embed.w is read on stage 1", "held by stage 0")),
    "calls in another order": (
        given(lambda inner: inner, backwards()),
        "PlanError",
        ("_logits(head.w)", "is called after", "the order of their calls"),
    ),
    "a last stage without a backward": (
        given(lambda inner: inner, linked(detached)),
        "PlanError",
        ("no gradient goes through the units of the last stage",),
    ),
    "a write to shared memory": (
        given(lambda inner: inner, linked(shared_write)),
        "PlanError",
        ("writes in place to results that share memory", "output 0 of unit", ".clone()"),
    ),
    "a value inside of a unit": (
        lambda mesh: given(lambda inner: inner, keeping(0, True))(mesh),
        "PlanError",
        ("from inside of these units", "keeps(a.w)", "Return them from the unit"),
    ),
    "a result that is kept inside of a unit": (
        lambda mesh: given(lambda inner: inner, keeping(1, False))(mesh),
        "PlanError",
        ("from inside of these units", "keeps(b.w)"),
    ),
    "a leaf elsewhere": (
        given(lambda inner: inner, PROGRAMS["tied"](), leaves=[("bias", -1)]),
        "PlanError",
        ("is called after",),
    ),
    "other cuts": (
        lambda mesh: on_rank(StagedRun(stages={"cut": (2, 4) if mesh.rank else (3, 3)}), mesh, 1),
        "ReplicationError",
        ("stages of blocks.1.up: rank 0: (0,), rank 1: (1,)",),
    ),
    "other orders": (
        lambda mesh: on_rank(StagedRun(policy={"pipeline": "gpipe" if mesh.rank else "1f1b"}), mesh, 1),
        "ReplicationError",
        ("schedule.pipeline: rank 0: '1f1b', rank 1: 'gpipe'",),
    ),
    "other numbers": (
        lambda mesh: on_rank(StagedRun(accumulate=4 if mesh.rank else 2), mesh, 1),
        "ReplicationError",
        ("accumulate: rank 0: 2, rank 1: 4",),
    ),
}


def raised(call: Callable[[fs.Mesh], Any]) -> list[Raised | None]:
    """What each of two ranks raises."""
    mesh = fs.virtual_mesh((2, 1), ("stage", "data"))
    return [*mesh.run(lambda: attempt(lambda: call(mesh)))]


@pytest.mark.parametrize(("call", "kind", "says"), PLANS.values(), ids=PLANS.keys())
def test_bad_plans(call: Callable[[fs.Mesh], Any], kind: str, says: tuple[str, ...]) -> None:
    """What a plan or a step cannot be is said when it is made."""
    found = [None if one is None else Raised(one.kinds, one.text.split("\non rank ")[0]) for one in raised(call)]
    alike(found, kind, says)


@pytest.mark.parametrize(("call", "kind", "says"), STEPS.values(), ids=STEPS.keys())
def test_bad_steps(call: Callable[[fs.Mesh], Any], kind: str, says: tuple[str, ...]) -> None:
    """What a step finds is said on all ranks."""
    found = raised(call)
    for one in found:
        assert one is not None and kind in one.kinds, found
        assert not [part for part in says if part not in one.text], one.text


def test_own_errors() -> None:
    """What the function itself raises in its trace is raised on all ranks."""
    found = raised(given(lambda inner: lambda params, batch: 1 / 0))
    assert all(one is not None and "division by zero" in one.text for one in found)


def test_order_without_stages() -> None:
    """``pipeline=`` needs stages."""
    mesh = fs.virtual_mesh((2,), ("data",))
    run = StagedRun(policy={"pipeline": "gpipe"})
    with pytest.raises(fs.errors.PlanError, match="the plan has no stages"):
        mesh.run(lambda: made(run, mesh))


def test_values_inside_of_units_of_the_same_stage() -> None:
    """A list may have them: the stage that reads them has called the unit."""
    mesh = fs.virtual_mesh((2, 1), ("stage", "data"))
    for inner in (True, False):
        mesh.run(lambda: given(lambda inner: inner, keeping(-1, inner))(mesh))  # noqa: B023


def test_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of many lengths are let go, with a warning, and lengths that come again give the same numbers."""
    monkeypatch.setattr(pipeline_runner, "MANY", 1)
    mesh = fs.virtual_mesh((2, 1), ("stage", "data"))

    def rank() -> tuple[list[float], list[int]]:
        step, _, state, batch = made(StagedRun(step={"clip_norm": None}, opt=lambda: fs.optim.sgd(0.0)), mesh)
        losses, kept, rows = [], [], batch(0)
        for length in (1, 2, 3, 4, 5, 6, 1, 2):
            state, metrics = step(state, {name: x[:, :length] for name, x in rows.items()})
            losses.append(metrics.loss.item())
            runner = step._staged
            kept.append(len(runner.cuts) + len(runner.plans) + len(runner.staged) + len(runner._needs))
        return losses, kept

    with pytest.warns(UserWarning, match="1 different shapes"):
        found = mesh.run(rank)
    for losses, kept in found:
        assert losses[:2] == losses[6:]
        assert max(kept) <= 4 * 4 + 1


def test_state_after_refusals() -> None:
    """A refused step leaves the state: the next one has the bits of a run without it."""
    mesh = fs.virtual_mesh((2, 1), ("stage", "data"))

    def rank() -> list[list[float]]:
        out = []
        for refused in (True, False):
            step, plan, state, batch = made(StagedRun(), mesh)
            losses = []
            for number in range(3):
                if refused:
                    bad = {name: x[: 10 + mesh.rank] for name, x in batch(number).items()}
                    assert attempt(lambda: step(state, bad)) is not None  # noqa: B023
                state, metrics = step(state, batch(number))
                losses += [metrics.loss.item(), metrics.grad_norm.item()]
            out.append(losses)
        return out

    for refused, without in mesh.run(rank):
        assert refused == without and all(torch.tensor(without).isfinite())
