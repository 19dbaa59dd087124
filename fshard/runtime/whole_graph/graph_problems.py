"""Train steps that no graph can hold."""

from collections.abc import Iterator

from fshard.optim.base import Optimizer
from fshard.runtime.memory.optimizer_layout import left_by_sums
from fshard.runtime.steps import Options
from fshard.runtime.whole_graph.device_capture import Capture
from fshard.sharding.plan import Plan

CAPTURABLE = ("adamw", "sgd")
"""Optimizers that read their rate and the number of the update from device memory."""


def graph_problems(plan: Plan, opt: Optimizer, options: Options, capture: Capture | None, mode: str) -> Iterator[str]:
    """Say why no step of these options can be captured.

    Args:
        plan: the plan.
        opt: the optimizer.
        options: of the step.
        capture: what captures the work of the mesh's device; None if nothing does.
        mode: ``Policy(graph=)``.
    """
    device, running = plan.mesh.device, options.running
    asked = f"Policy(graph={mode!r})"
    if capture is None:
        yield f"{asked} captures CUDA graphs, and the mesh is on device {str(device)!r}: leave graph= out"
    if plan.stages is not None:
        yield f"{asked}: the host steers what the stages of a pipeline send: leave graph= or stages= out"
    if mode == "segments" and running.policy.update == "beside":
        yield f"{asked}: an update beside compute does not end with a segment: use update='deferred' or graph='step'"
    if running.policy.update == "in_backward":
        yield f"{asked} needs update='deferred': a graph begins with the update of the step before"
    if not vars(type(opt)).get("capturable", False):
        yield (
            f"{asked}: {type(opt).__name__} reads its rate or its count from the host: the optimizers "
            f"{' and '.join(CAPTURABLE)} can be captured"
        )
    if not options.donate:
        yield f"{asked} needs donate=True: a graph updates the state where it lies"
    if running.debug:
        yield f"{asked} has no operators for debug=True to look at: leave one of them out"
    if running.remat.offloads:
        yield f"{asked}: remat='offload' copies activations to the host"
    yield from _group_problems(plan, asked)


def _group_problems(plan: Plan, asked: str) -> Iterator[str]:
    """Say which groups the host takes part in, or which leave something for the next step."""
    for group in plan.groups:
        path = group.leaves[0].path
        if group.offloaded or group.kinds.hosted or group.kinds.opt != "device":
            yield f"{asked}: {path} or its optimizer state is kept in memory of the host, or updated there"
        elif left_by_sums(group):
            yield f"{asked}: sums of the gradient of {path} leave something for the next step (fs.Wire)"
        else:
            continue
        return
