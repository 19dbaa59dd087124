"""The graph of one program on the memory of one state, and why a step runs without one."""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor

from fshard import tree
from fshard.runtime.engine.batch import microbatches, signature
from fshard.runtime.execution import Rounding, Shards
from fshard.runtime.graphs.surroundings import Surroundings
from fshard.runtime.steps import Prepared
from fshard.runtime.steps.interpreter_modes import modes
from fshard.runtime.steps.readings import RuleNorms
from fshard.runtime.steps.records import PassResult
from fshard.runtime.whole_graph.device_capture import Replay
from fshard.schedule.ops import Op
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
