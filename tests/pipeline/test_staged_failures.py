"""A stage that fails in the middle of a step: all ranks raise, the state is as it was, and the next step is right."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

import fshard as fs
from fshard import tree
from tests.pipeline.programs import PROGRAMS
from tests.pipeline.staged_runs import adamw
from tests.shared.bad import Raised, attempt

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
