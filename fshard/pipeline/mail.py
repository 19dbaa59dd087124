"""Messages between stages: over an edge goes one tensor a microbatch, on a communicator of its lane."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fshard.errors import ScheduleError
from fshard.pipeline import staged_refusals
from fshard.pipeline.rank_program import Lane, MessageKind
from fshard.pipeline.stage_sums import StageSums
from fshard.runtime.comm.communicator import Communicator, Handle, Transport
from fshard.runtime.execution.actions import Actions
from fshard.runtime.execution.route import Run
from fshard.schedule.ops import Op
from fshard.sharding.mesh import Mesh

Key = tuple[str, int]
"""An edge and a microbatch."""

ROLE = "edge"
"""How the roles of the communicators of edges begin."""


class Mail:
    """Sends and receives the messages of one rank.

    Args:
        mesh: the mesh of all stages.
        axis: its axis of stages.
        messages: what goes over each edge, by name.
        lanes: the ways between stages, of all ranks.

    Attributes:
        outbox: what is to be sent, by edge and microbatch.
        inbox: what has arrived.
        failed: whether the program of this rank has failed: other ranks wait, and get zeros.
    """

    def __init__(self, mesh: Mesh, axis: str, messages: Mapping[str, MessageKind], lanes: Sequence[Lane]) -> None:
        self.mesh, self.axis, self.messages, self.lanes = mesh, axis, messages, lanes
        self.comms: dict[Lane, Communicator] = {}
        self.outbox: dict[Key, Tensor] = {}
        self.inbox: dict[Key, Tensor] = {}
        self.failed = False
        self._handles: dict[Key, Handle] = {}
        self._arriving: dict[Key, Tensor] = {}

    def open(self, transport: Transport) -> None:
        """Make the communicators of all lanes. Collective at its first call."""
        for lane in self.lanes:
            if lane not in self.comms:
                self.comms[lane] = transport.between(f"{ROLE} {lane}", self.axis, lane[:2])

    def start(self) -> None:
        """Begin a step."""
        self.failed = False
        self.outbox.clear()
        self.inbox.clear()
        self._handles.clear()
        self._arriving.clear()

    def post(self, name: str, microbatch: int, value: Tensor) -> None:
        """Put a value into the outbox.

        Raises:
            UnitError: it has another shape or dtype than when the program was traced, which its receiver expects.
        """
        edge = self.messages[name].edge
        if value.shape != edge.shape or value.dtype != edge.dtype:
            given, traced = (f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (value, edge))
            raise staged_refusals.other_message(name, microbatch, given, traced)
        self.outbox[name, microbatch] = value

    def run(self, op: Op) -> Run:
        """Return what an op of an edge does."""
        verbs = {
            "send": self._send,
            "receive": self._receive,
            "wait send": self._sent,
            "wait receive": self._received,
        }
        return partial(verbs[op.kind], (op.target, op.microbatch))

    def _send(self, key: Key) -> None:
        kind = self.messages[key[0]]
        value = self.outbox.pop(key, None)
        if value is None:
            if not self.failed:
                raise ScheduleError(f"{key[0]} of microbatch {key[1]} is to be sent before it was computed")
            value = torch.zeros(kind.edge.shape, dtype=kind.edge.dtype, device=self.mesh.device)
        self._handles[key] = self._exchange(kind, kind.receiver, value.new_empty(0), value.permute(kind.edge.dims))

    def _receive(self, key: Key) -> None:
        kind = self.messages[key[0]]
        value = self._arriving[key] = kind.edge.empty(self.mesh.device)
        self._handles[key] = self._exchange(kind, kind.sender, value.permute(kind.edge.dims), value.new_empty(0))

    def _sent(self, key: Key) -> None:
        self._handles[key].wait()
        del self._handles[key]

    def _received(self, key: Key) -> None:
        self._sent(key)
        self.inbox[key] = self._arriving.pop(key)

    def _exchange(self, kind: MessageKind, peer: int, out: Tensor, full: Tensor) -> Handle:
        comm = self.comms[kind.lane]
        if comm.size < self.mesh.axis_size(self.axis):  # one of these two positions alone
            peer = sorted((kind.sender, kind.receiver)).index(peer)
        into, sent = (x.detach().contiguous().view(-1).view(torch.uint8) for x in (out, full))
        receive, send = ([len(x) if at == peer else 0 for at in range(comm.size)] for x in (into, sent))
        return comm.all_to_all(into, sent, receive, send)


class MailActions:
    """Performs the ops of a schedule of stages.

    Args:
        inner: performs the ops that steps without stages have, too.
        mail: sends and receives.
        sums: adds up gradients of leaves that several stages hold.
    """

    def __init__(self, inner: Actions, mail: Mail, sums: StageSums) -> None:
        self.inner, self.mail, self.sums, self.readable = inner, mail, sums, inner.readable

    def open(self, transport: Transport) -> None:
        """Make the communicators between stages. Collective at its first call."""
        self.mail.open(transport)
        self.sums.open(transport)

    def bind(self, ops: Sequence[Op]) -> list[Run | None]:
        """Return what to call for each op; None for computes, updates, the handshake and the consensus."""
        own = {at: run for at, op in enumerate(ops) if (run := self._own(op)) is not None}
        others = iter(self.inner.bind([op for at, op in enumerate(ops) if at not in own]))
        return [own[at] if at in own else next(others) for at in range(len(ops))]

    def _own(self, op: Op) -> Run | None:
        """Return what to call for an op that steps without stages do not have."""
        if op.target in self.mail.messages:
            return self.mail.run(op)
        return self.sums.run(op) if op.kind in ("stage_sum", "wait stage_sum") else None

    def apply(self, groups: Sequence[int]) -> None:
        """Update these groups."""
        self.inner.apply(groups)

    def where(self, name: str) -> str:
        """The unit and the leaves of a group, as an error names them."""
        return self.inner.where(name)
