"""The graph of one program on the memory of one state, and why a step runs without one, or no step can have one."""

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor

from fshard import tree
from fshard.optim.base import Optimizer
from fshard.runtime.engine.batch import microbatches, signature
from fshard.runtime.execution import Rounding, Shards
from fshard.runtime.graphs.surroundings import Surroundings
from fshard.runtime.steps import Options, Prepared
from fshard.runtime.steps.handshake import modes
from fshard.runtime.steps.readings import RuleNorms
from fshard.runtime.steps.records import PassResult
from fshard.runtime.whole_graph.device_capture import Capture, Replay
from fshard.schedule.ops import Op
from fshard.sharding.plan import Plan
from fshard.sharding.spec import P

READY, CAPTURES = 0, 1
"""Numbers of what a rank can do with a step: it replays a graph, or makes one."""

WHY = {
    2: "the step is among the first with this program, batch and state",
    3: "no update waits, and a graph holds one",
    4: "the update that waits is the first one",
    5: "the update that waits is half done, or reads gradients in other memory",
    6: "leaves began to train later than others",
    7: "ops are observed",
    8: "a value has changed that the Python of the loss function reads",
    9: "as many graphs are held as may be",
    10: "the program depends on values of tensors, and is gathered on demand",
    11: "the step cannot be captured",
}
"""By number, the reasons for which it runs without a graph. Of ranks that have several, the largest number counts."""

FIRST, NO_UPDATE, FIRST_UPDATE, ELSEWHERE, LATE, OBSERVED, CHANGED, FULL, ON_DEMAND, REFUSED = WHY

WARM = 2
"""Steps that run eagerly before a capture: libraries make their handles, and compilers their kernels."""

MOST = 8
"""Graphs that a step holds."""


@dataclass(eq=False)
class StepGraph:
    """A graph, or what will be one.

    Attributes:
        key: what of a batch, and of the interpreter's modes, it holds for.
        prepared: the program.
        shards: the memory of the state that it works on.
        batch: the batch in memory of its own, to which each batch is copied.
        parts: its microbatches.
        seen: the steps that have run eagerly.
        replay: does its work; None before the capture.
        measured: what the program came to: tensors that each replay writes.
        norms: of gradients, see ``Runner._norms``.
        record: the ops that it does.
        surroundings: the values that the Python of the loss function has read.
        rounding: that of its update: tables on the device depend on its seed.
        left: after a replay that has failed, the groups that it has left, see ``Update.made``; None if nobody knows.
    """

    key: Hashable
    prepared: Prepared
    shards: "ref[Shards]"
    batch: Any = None
    parts: Sequence[Any] = ()
    seen: int = 0
    replay: Replay | None = None
    measured: PassResult = field(default_factory=PassResult)
    norms: tuple[RuleNorms, Sequence[RuleNorms]] = ((), ())
    record: Sequence[Op] = ()
    surroundings: Surroundings | None = None
    rounding: Rounding | None = None
    left: tuple[Collection[int], Collection[int]] | None = None

    def fits(self, key: Hashable, prepared: Prepared, shards: Shards) -> bool:
        """Tell whether it is for this program and this memory."""
        return self.prepared is prepared and self.shards() is shards and self.key == key

    def copy_batch(self, batch: Any, accumulate: int, spec: P) -> None:
        """Copy a batch to where the graph reads it."""
        if self.batch is None:
            self.batch = tree.mapped(_like, batch)
            self.parts = microbatches(self.batch, accumulate, spec)
        for own, given in zip(tree.leaves(self.batch), tree.leaves(batch), strict=True):
            if isinstance(own, Tensor):
                own.copy_(given)

    def result(self) -> PassResult:
        """The losses and values of the latest replay, to which the next one does not write."""
        return self.measured._replace(aux=[tree.mapped(_copied, aux) if aux else aux for aux in self.measured.aux])


def key_of(batch: Any) -> Hashable:
    """Return what a graph assumes of a batch and of the modes of the interpreter."""
    tensors = [x for x in tree.leaves(batch) if isinstance(x, Tensor)]
    floats = tuple([x for x in tree.leaves(batch) if isinstance(x, float)])
    return signature(batch), floats, tuple([(x.shape, x.stride(), x.dtype) for x in tensors]), modes()


def _like(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


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
    for group in plan.groups:
        if group.offloaded or group.kinds.hosted or group.kinds.opt != "device":
            path = group.leaves[0].path
            yield f"{asked}: {path} or its optimizer state is kept in memory of the host, or updated there"
            return
