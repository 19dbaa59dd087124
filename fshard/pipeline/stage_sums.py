"""Gradients of leaves that several stages hold, such as a tied embedding: summed in the order of positions."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from fshard.runtime.comm.communicator import Communicator, Handle, Transport
from fshard.runtime.execution.route import Run
from fshard.runtime.memory.gradients import FlatGradients
from fshard.schedule.ops import Op
from fshard.sharding.plan import Plan

ROLE = "stage_sum"
"""How the roles of these communicators begin."""


def shared_by(whole: Plan) -> list[tuple[int, ...]]:
    """The sets of positions that hold a trained leaf together, of a plan of all stages."""
    assert whole.stages is not None
    holders = [whole.stages.positions(group.leaves[0].path) for group in whole.groups if group.trainable]
    return sorted({held for held in holders if len(held) > 1})


def role_of(held: Sequence[int]) -> str:
    """The role of the communicators of some positions."""
    return f"{ROLE} {'+'.join(map(str, held))}"


class StageSums:
    """Adds up gradients over the positions that hold a leaf.

    Args:
        whole: the plan of all stages.
        own: that of this rank.
        gradients: of this rank.
    """

    def __init__(self, whole: Plan, own: Plan, gradients: FlatGradients) -> None:
        assert whole.stages is not None
        self.axis, self.gradients = whole.stages.axis, gradients
        self.position = whole.mesh.index(self.axis)
        self.sets = shared_by(whole)
        self.groups = {group.name: group.id for group in own.groups}
        self.holders = {group.id: whole.stages.positions(group.leaves[0].path) for group in own.groups}
        self.comms: dict[tuple[int, ...], Communicator] = {}
        self._under_way: dict[int, tuple[Handle, Tensor]] = {}

    def open(self, transport: Transport) -> None:
        """Make the communicators of all sets of positions that share a leaf. Collective at its first call."""
        for held in self.sets:
            if held not in self.comms:
                self.comms[held] = transport.between(role_of(held), self.axis, held)

    def run(self, op: Op) -> Run:
        """Return what an op does."""
        return partial(self._start if op.kind == "stage_sum" else self._finish, self.groups[op.target])

    def _start(self, group: int) -> None:
        """Send this rank's part of a gradient to the others."""
        mine, held = self.gradients.buffers[group].own, self.holders[group]
        comm = self.comms[held]
        alone = comm.size == len(held)
        places = [held.index(p) if alone else p for p in held if p != self.position]
        sizes = [mine.numel() if at in places else 0 for at in range(comm.size)]
        sent, received = mine.repeat(len(places)), mine.new_empty(len(places) * mine.numel())
        handle = comm.all_to_all(received, sent, sizes, sizes)
        self._under_way[group] = handle, received

    def _finish(self, group: int) -> None:
        """Add up the parts in the order of positions."""
        handle, received = self._under_way.pop(group)
        handle.wait()
        mine, held = self.gradients.buffers[group].own, self.holders[group]
        others = iter(received.view(len(held) - 1, -1))
        rows = [mine.clone() if position == self.position else next(others) for position in held]
        mine.copy_(rows[0])
        for row in rows[1:]:
            mine.add_(row)
