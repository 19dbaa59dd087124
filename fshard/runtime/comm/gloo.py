"""Communicators over gloo, made of point-to-point messages.

gloo's own reduce-scatter is an all-reduce: twice the bytes, finished inside ``wait``. Its all-gather and all-to-all
copy everything once more. Here every rank sends each peer only what that peer needs, straight from where
it lies to where it belongs, all pairs at the same time, and adds what it receives in the order of ranks. That is the
fewest bytes, no copies, and the same sum in every run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import get_ident
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor, empty

from fshard.errors import CommError
from fshard.runtime.comm.communicator import Events, Handle, Sizes, chunks, sum_rows
from fshard.runtime.comm.pending import Pending, naming_errors
from fshard.runtime.comm.watchdog import Watchdog

TURNS, KINDS = 1 << 20, 1 << 11
"""Values of a tag's two parts, 31 bits together: a running number, and the kind of the message."""

PIECE = 4 << 20
"""Most bytes of a message that the receiver adds up: it adds one piece while the next arrives."""


@dataclass(eq=False)
class GlooCommunicator:
    """A gloo communicator.

    Each message has its own tag, which both sides compute alike, since all ranks issue a communicator's collectives in
    one order. The tag contains a running number, the collective and the length. So messages cannot be confused, in
    whatever order they arrive, and a rank that is at another collective times out and does not receive wrong data.

    Attributes:
        watchdog: sees long waits.
        ranks: the rank in the mesh of each position, for errors.
        fatal: whether no rank can continue after a failed wait.
        key: names the communicator in failure notes.
        closed: why it can no longer be used.
    """

    name: str
    size: int
    group: Any
    watchdog: Watchdog
    ranks: Sequence[int]
    fatal: bool = True
    key: str = ""
    numbers: Iterator[int] = field(default_factory=count)
    closed: str = ""

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """Receive the peers' shards at their places in ``out``."""
        with self._naming("all-gather") as describe:
            rows, tag, me, peers = out.view(self.size, -1), self._tag("g", shard), self.group.rank(), self._peers()
            works = [(peer, self.group.send([shard], peer, tag)) for peer in peers]
            works += [(peer, self.group.recv([rows[peer]], peer, tag)) for peer in peers]
        rows[me].copy_(shard)
        return MessageHandle(describe, works, (out, shard), self)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """Receive the peers' rows of this rank's chunk in ``stage``; ``wait`` adds them."""
        parts, works = [], []
        with self._naming("reduce-scatter") as describe:
            sent, me, peers = full.view(self.size, -1), self.group.rank(), self._peers()
            rows = list(stage[: full.numel() - out.numel()].view(self.size - 1, -1))
            rows.insert(me, sent[me])
            for cut in pieces(out):
                tag = self._tag("s", sent[me][cut])
                works += [(peer, self.group.send([sent[peer][cut]], peer, tag)) for peer in peers]
                arrivals = {peer: self.group.recv([rows[peer][cut]], peer, tag) for peer in peers}
                parts.append(Sum(out[cut], [row[cut] for row in rows], arrivals, add))
        return MessageHandle(describe, works, (full, stage), self, parts)

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """gloo's ring, in place."""
        with self._naming("all-reduce") as describe:
            return RingHandle(Pending(dist.all_reduce(buffer, group=self.group, async_op=True), describe), self)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """Receive each chunk at its place in ``out``. Empty chunks are not sent."""
        to, into = chunks(full, self.size, send), chunks(out, self.size, receive)
        with self._naming("all-to-all") as describe:
            tag, me = self._tag("a", out[:0]), self.group.rank()
            works = [(peer, self.group.send([to[peer]], peer, tag)) for peer in self._peers() if to[peer].numel()]
            works += [(peer, self.group.recv([into[peer]], peer, tag)) for peer in self._peers() if into[peer].numel()]
        into[me].copy_(to[me])
        return MessageHandle(describe, works, (out, full), self)

    def close(self, reason: str = "") -> None:
        """Release the process group. Its connections close when it is destroyed and no message is in flight."""
        if reason and self.key and not self.closed:
            self.watchdog.notes.leave(f"{self.key}/{self.group.rank()}", reason)
        self.closed, self.group = reason or "the mesh was closed", None

    def unreachable(self) -> list[int]:
        """The ranks whose connections are closed: sending to them fails at once."""
        out = []
        for peer in self._peers():
            try:
                self.group.send([empty(1)], peer, TURNS * KINDS - 1)
            except RuntimeError:
                out.append(self.ranks[peer])
        return out

    @contextmanager
    def _naming(self, call: str) -> Iterator[str]:
        describe = f"{call} on {self.name}"
        if self.closed:
            raise CommError(f"{describe} failed: it is closed: {self.closed}")
        try:
            with naming_errors(describe):
                yield describe
        except CommError as error:  # a peer had closed its connections before
            left = {peer: reason for peer in self._peers() if (reason := self.reason(peer))}
            told = "; ".join(f"rank {self.ranks[peer]} gave up: {reason}" for peer, reason in left.items())
            raise CommError(f"{error}; {told}" if told else str(error)) from error

    def explaining(self) -> AbstractContextManager[None]:
        """Errors inside quote what each rank was calling."""
        return self.watchdog.explaining(self.ranks, self.fatal)

    def reason(self, peer: int) -> str:
        """Why a peer has closed this communicator; empty if it has not, or left no note."""
        return self.watchdog.notes.reason_of(f"{self.key}/{peer}") if self.key else ""

    def _tag(self, call: str, part: Tensor) -> int:
        return next(self.numbers) % TURNS * KINDS + crc32(f"{call}{part.nbytes}".encode()) % KINDS

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that ranks do not all begin with the same peer."""
        me = self.group.rank()
        return [(me + step) % self.size for step in range(1, self.size)]


@dataclass(frozen=True)
class RingHandle:
    """The handle of a sum by gloo's ring, whose errors do not name the lost rank."""

    work: Pending
    comm: GlooCommunicator

    def wait(self) -> None:
        """Wait as long as the communicator's timeout."""
        with self.comm.explaining():
            try:
                with self.comm.watchdog.waiting(self.work.describe):
                    self.work.wait()
            except CommError as error:
                lost = " and ".join(f"rank {rank}" for rank in self.comm.unreachable())
                told = f"{lost} cannot be reached" if lost else f"one of the ranks {list(self.comm.ranks)} did not come"
                raise CommError(f"{error} ({told})") from error


@dataclass(frozen=True)
class Sum:
    """A sum of rows, some of which are still in flight."""

    out: Tensor
    rows: Sequence[Tensor]
    arrivals: dict[int, Any]
    add: bool

    def finish(self, wait: Callable[[int, Any], None]) -> None:
        """Add the rows in the order of ranks, each when it has arrived. ``out`` may be the first received row."""
        sum_rows(self.out, self._arriving(wait), self.add)

    def _arriving(self, wait: Callable[[int, Any], None]) -> Iterator[Tensor]:
        for rank, row in enumerate(self.rows):
            if rank in self.arrivals:
                wait(rank, self.arrivals[rank])
            yield row


@dataclass(frozen=True)
class MessageHandle:
    """The handle of a collective that is made of messages: ``sums`` to compute, and other ``works`` to wait for.

    gloo knows only addresses, so ``tensors`` keeps the memory behind them.
    """

    describe: str
    works: list[tuple[int, Any]]
    tensors: Sequence[Tensor]
    comm: GlooCommunicator
    sums: Sequence[Sum] = ()

    def wait(self) -> None:
        """Wait for each message, at most as long as the communicator's timeout."""
        with self.comm.explaining():
            try:
                for part in self.sums:
                    part.finish(self._wait)
                for peer, work in self.works:
                    self._wait(peer, work)
            finally:  # these keep connections open, even in the traceback of an error
                self.works.clear()
                for part in self.sums:
                    part.arrivals.clear()

    def _wait(self, peer: int, work: Any) -> None:
        rank, waits, me = self.comm.ranks[peer], self.comm.watchdog.waits, get_ident()
        try:
            with naming_errors(self.describe, rank):
                waits[me] = self.describe, rank
                work.wait()
        except CommError as error:
            # The peer may have lost another rank: a rank that gives up closes its connections, like one that dies.
            reason = self.comm.reason(peer)
            raise CommError(f"{error}; it gave up: {reason}" if reason else str(error)) from error
        finally:
            del waits[me]


def pieces(chunk: Tensor) -> list[slice]:
    """Equal pieces of a chunk, none above ``PIECE`` bytes."""
    number = max(1, -(-chunk.nbytes // PIECE))
    width = -(-chunk.numel() // number)
    return [slice(at, min(at + width, chunk.numel())) for at in range(0, chunk.numel(), width)]
