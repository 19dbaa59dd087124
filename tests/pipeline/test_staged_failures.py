"""A stage that fails in the middle of a step: all ranks raise, the state is as it was, and the next step is right."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import fshard as fs
from fshard import tree
from tests.faults.program import PHASES, differing, make_loss, snapshot
from tests.faults.program import Fault as Armed
from tests.faults.program import batch as rows
from tests.pipeline.programs import PROGRAMS
from tests.pipeline.staged_runs import adamw
from tests.shared.bad import Raised, attempt, weights

SECOND = 2
"""The microbatch, from 1, in which the program fails."""


class Fault(torch.autograd.Function):
    """A value as it is, which may raise in its forward or its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: Any, where: str) -> Tensor:
        """Count, and fail."""
        ctx.fails, ctx.where = fails, where
        if where == "forward":
            fails(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Likewise."""
        if ctx.where == "backward":
            ctx.fails(grads[0])
        return grads[0], None, None


def stepped(
    mesh: fs.Mesh, stages: Any, where: str, stage: int, order: str
) -> tuple[Raised | None, list[float], list[float]]:
    """On a rank: the error of a step that fails on one stage, and two steps after it, and without it."""
    program, armed, seen = PROGRAMS["stack"](), [False], [0]

    def fails(x: Tensor) -> None:
        if armed[0] and not isinstance(x, FakeTensor):
            seen[0] += 1
            if seen[0] == SECOND:
                raise ArithmeticError("the second microbatch is odd")

    def loss_of() -> Any:
        inner = program.make(lambda fn: fs.unit(lambda p, x: fn(p, Fault.apply(x, fails, where) if "up" in p else x)))

        def loss_fn(params: Any, batch: Any) -> Any:
            return inner(params, batch)

        return loss_fn

    start = tree.nest({path: leaf.clone() for path, leaf in program.params.items()})
    plan = fs.make_plan(
        start,
        mesh,
        [(".*", fs.fsdp("data"))],
        batch=fs.P("data"),
        units=program.units,
        stages=fs.Stages("stage", **stages),
    )
    out, raised = [], None
    for faulty in (True, False):
        policy = fs.Policy(pipeline=order)
        step = fs.make_train_step(loss_of(), adamw(), plan, accumulate=4, clip_norm=0.3, schedule=policy)
        state, losses = fs.init_state(plan, adamw(), params=start), []
        for number in range(3):
            batch = plan.local_batch(program.batch(number))
            if faulty and number == 1:
                armed[0], seen[0] = mesh.index("stage") == stage, 0
                raised = attempt(lambda: step(state, batch))  # noqa: B023
                armed[0] = False
            state, metrics = step(state, batch)
            losses += [metrics.loss.item(), metrics.grad_norm.item()]
        out.append(losses)
    return raised, out[0], out[1]


FIRST = ("forward first", "between", "forward middle", "backward first")
"""The phases of the first stage; the last one comes to the others."""

FAULTS = [("ValueError", phase, "1f1b", style) for phase in PHASES for style in ("", "talk")]
FAULTS += [(kind, phase, "zb_h1", "mean") for kind in ("MemoryError", "OutOfMemoryError") for phase in PHASES]
FAULTS += [("SystemExit", phase, "gpipe", "") for phase in PHASES]
"""What goes wrong, where, in which order, in which style of program."""


def disturbed(mesh: fs.Mesh, kind: str, phase: str, victim: int, order: str, style: str) -> Any:
    """On a rank: what a step raises, what it leaves changed, and what of the next one is unlike a run without it."""
    mine, ends, raised, changed = mesh.index("shard"), [], None, list[str]()
    for faulty in (True, False):
        fault = Armed()
        rules = [(r".*\.b", fs.P()), (r".*", fs.fsdp("shard"))]
        stages, units = fs.Stages("stage", cut=(2, 1)), ("first", "middle", "last")
        plan = fs.make_plan(weights(), mesh, rules, batch=fs.P("shard"), units=units, stages=stages)
        opt, policy = fs.optim.adamw(0.05), fs.Policy(pipeline=order)
        step = fs.make_train_step(make_loss(fault, style), opt, plan, accumulate=2, schedule=policy)
        state, _ = step(fs.init_state(plan, opt, params=weights()), rows(0, mine))
        if faulty:
            before = snapshot(state)
            fault.phase, fault.kind = phase if mesh.rank == victim else "", kind
            try:
                step(state, rows(1, mine))
            except BaseException as error:
                raised = [kind.__name__ for kind in type(error).__mro__]
            fault.phase = ""
            changed = differing(before, snapshot(state))
        state, metrics = step(state, rows(1, mine))
        ends.append({**snapshot(state), "loss": metrics.loss.item(), "rng": 0})
    return raised, changed, differing(*ends)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("kind", "phase", "order", "style"), FAULTS)
def test_any_fault(kind: str, phase: str, order: str, style: str) -> None:
    """All ranks raise, all of the state is as it was, and the next step has the bits of a run without the fault."""
    mesh, victim = fs.virtual_mesh((2, 2), ("stage", "shard")), 2 * (phase not in FIRST) + len(phase) % 2
    for rank, (raised, changed, unlike) in enumerate(
        mesh.run(lambda: disturbed(mesh, kind, phase, victim, order, style))
    ):
        assert raised is not None and (kind if rank == victim else "PeerError") in raised, (rank, raised)
        assert changed == unlike == [], rank


CASES = [
    ("forward", 0, "1f1b", {}),
    ("backward", 1, "1f1b", {}),
    ("backward", 0, "gpipe", {}),
    ("forward", 1, "gpipe", {}),
    ("backward", 1, "interleaved", {"chunks": 2}),
    ("forward", 1, "zb_h1", {}),
    ("backward", 1, "zb_h1", {}),
    ("backward", 0, "zb_h1", {}),
    ("backward", 0, "zbv", {"chunks": 2, "placement": "v"}),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("where", "stage", "order", "stages"), CASES)
def test_a_stage_fails(where: str, stage: int, order: str, stages: dict[str, Any]) -> None:
    """The error is told to all ranks; steps after it have the bits of a run without it."""
    mesh = fs.virtual_mesh((2, 2), ("stage", "data"))
    for rank, (raised, after, without) in enumerate(mesh.run(lambda: stepped(mesh, stages, where, stage, order))):
        assert raised is not None and "the second microbatch is odd" in raised.text, (rank, raised)
        assert after == without
