"""``fs.verify``: one step compared with plain PyTorch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fshard.arguments import Want, expect
from fshard.errors import PlanError, no_processes
from fshard.optim import checks
from fshard.played.everywhere import on_each_rank
from fshard.proof.comparison import Comparison
from fshard.proof.plain_torch import ProofTask, earliest, run_plainly
from fshard.proof.verification import Tolerance, Verified
from fshard.proof.watched_step import ProofStep
from fshard.runtime.comm import collective_call, enter
from fshard.runtime.engine.batch import marks_undone
from fshard.runtime.steps import refuse_transforms
from fshard.sharding.stage_table import refuse_stages
from fshard.state.settle import complete
from fshard.state.train_state import TrainState, expect_state
from fshard.training.train_step import TrainStep


@collective_call
def verify(step: TrainStep, state: TrainState, batch: Any, *, rtol: float | None = None, atol: float = 0.0) -> Verified:
    """Run one step, and the same step by plain PyTorch on whole parameters, and compare the results. Collective.

    Plain PyTorch is the same loss function on ordinary tensors, ``torch.autograd.grad``, and the optimizer on whole
    leaves. It compares the outputs of every call of a unit, the loss, the gradient of every leaf, the gradient norm
    and, given the step's own gradient, every leaf of the updated parameters and of the optimizer's state. Call it once
    at the start of a run.

    It leaves the state, the step, its programs and random generators unchanged. Plain PyTorch draws the random numbers
    of the step and makes the casts of the plan's precision. Ranks take turns: one rank at a time holds all parameters
    and their gradients, as a plain process would, and every rank keeps the outputs of its units on the host.

    Args:
        step: the result of ``fs.make_train_step``.
        state: the state; it is not donated.
        batch: this rank's batch; outside of ``run`` of a virtual mesh the global one.
        rtol: the largest difference that is allowed, relative to the largest magnitude in the tensor; None for 1e-9 in
            float64, 1e-4 in float32, 1e-2 in float16 and 5e-2 in bfloat16, the largest of these that applies.
        atol: an absolute difference that is allowed in addition.

    Returns:
        The comparison; its repr is a table.

    Raises:
        VerifyError: results differ. The error, equal on all ranks, names the first unit whose output differs, and all
            leaves that do.
        PlanError: the loss itself communicates, as tensor-parallel and expert-parallel layers do over their axes, so
            one rank alone cannot compute it. Verify it on a mesh on which these axes have one rank.

    >>> w = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda p, x: (x @ p["w"]).sum(), opt, plan)
    >>> fs.verify(step, fs.init_state(plan, opt, params={"w": w}), torch.ones(1, 2))
    leaf          plain   sharded  difference  verdict
    loss             10        10     0.0e+00  equal
    grad_norm         2         2     0.0e+00  equal
    grad.w            2         2     0.0e+00  equal
    params.w   5.295281  5.295281     0.0e+00  equal
    outputs of 0 calls of units: equal
    """
    refuse_transforms("fs.verify")
    wants: list[Want] = [
        ("step", step, TrainStep, "what fs.make_train_step returned; of a step function, a train step of its loss")
    ]
    expect("verify(step, state, batch)", wants)
    refuse_stages("verify(step, state, batch)", step.plan)
    expect_state(state, "verify(step, state, batch): state")
    problems = checks.number("rtol", 0.0 if rtol is None else rtol, "[0, inf)")
    problems += checks.number("atol", atol, "[0, inf)")
    if problems:
        raise PlanError("; ".join(problems))
    mesh = step.plan.mesh
    if mesh.everywhere:
        result: Verified = on_each_rank(partial(verify, rtol=rtol, atol=atol), step, state, batch)
        return result
    if mesh.transport is None and mesh.size > 1:
        raise no_processes()
    state.check_plan(step.plan)
    enter(mesh, "verify")
    with untouched(), marks_undone([batch]):
        found = _verified(ProofStep(step), state, batch, Tolerance(rtol, atol))
    found.check()
    return found


def _verified(watched: ProofStep, state: TrainState, batch: Any, tolerance: Tolerance) -> Verified:
    state = replace(state, past=state.past.alone())
    complete(state, watched.plan.mesh)
    following, metrics = watched(state, batch)
    watched.check_alone()
    plan, comm, outputs = watched.plan, watched._runner.programs.comms.control, watched.outputs.calls
    fn, accumulate = watched._runner.finder.fn, watched.options.accumulate
    plain = run_plainly(ProofTask(fn, plan, state, batch, accumulate, watched.divided, outputs, tolerance, comm))
    first = earliest(comm, plain.first)
    rows = Comparison(watched, state, following, metrics, plain, tolerance, comm).rows()
    note = "the step was skipped: its gradients were not compared"
    if not metrics.skipped:
        note = "update='in_backward' keeps no gradients: updates are compared with those of plain PyTorch's gradients"
    return Verified(tuple(rows), len(outputs), first, () if watched.kept and not metrics.skipped else (note,))


@contextmanager
def untouched() -> Iterator[None]:
    """Restore torch's and Python's random generators at the end."""
    python = random.getstate()
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
