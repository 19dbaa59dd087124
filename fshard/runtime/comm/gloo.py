"""Communicators over gloo, made of point-to-point messages.

gloo's own reduce-scatter is an all-reduce: twice the bytes, finished inside ``wait``. Its all-gather and all-to-all
copy everything once more. Here every rank sends each peer only what that peer needs, straight from where
it lies to where it belongs, all pairs at the same time, and adds what it receives in the order of ranks. That is the
fewest bytes, no copies, and the same sum in every run.

Receives are posted before sends. gloo's receiver tells the sender that it is ready, over the connection that its own
bytes take: behind them, the rank that comes first could not send before it has received all.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any, Self
from zlib import crc32

import torch.distributed as dist
from torch import Tensor, empty

from fshard.errors import CommError
from fshard.forks import keep, own
from fshard.runtime.comm.communicator import CLOSED, Events, Handle, Sizes, chunks
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.row_sums import sum_rows
from fshard.runtime.comm.watchdog import Watchdog

NAME = "gloo_tcp_loop"
"""The name that gloo gives the thread of each process group that carries messages."""

hand_over = getattr(os, "sched_yield", lambda: None)
"""Lets threads run that wait for this processor."""


@contextmanager
def without_interrupting() -> Iterator[None]:
    """Inside, gloo's groups are made whose threads wait for a processor until it is free, or a slice of time is over.

    A send holds the lock of its connection. The answer wakes gloo's thread, often on the processor of the sender, which
    it interrupts; it tries the lock, does not get it, and tries again without a pause (pytorch/gloo#246). So both stand
    still until the kernel takes the processor from it, 2 to 4 ms later. Linux does not let threads of ``SCHED_BATCH``
    interrupt others when they wake: the send goes on, and gloo's thread follows. Where processors are free nothing
    changes. What has been given another policy than the usual one keeps it.
    """
    before = _threads()
    yield
    for thread in _threads() - before:
        with suppress(OSError):  # it is over, or may not be changed here
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _threads() -> set[int]:
    """The threads of this process by which gloo carries messages; none where the system is not Linux."""
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == NAME:
                found.add(int(path.parent.name))
    return found


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
        rank: this rank's position.
        forked: why a child of the process cannot even wait for messages that are under way.
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
    forked: str = ""
    rank: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.group.rank()
        own(self)

    def disown(self, why: str) -> None:
        """Take no more collectives, and wait for none."""
        keep([self.group])
        self.closed, self.forked, self.group = why, why, None

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """Receive the peers' shards at their places in ``out``."""
        rows = out.view(self.size, -1)
        with self._messages("all-gather") as messages:
            tag, peers = self._tag("g", shard), self._peers()
            for peer in peers:
                messages.receive(rows[peer], peer, tag)
            for peer in peers:
                messages.send(shard, peer, tag)
        rows[self.rank].copy_(shard)
        return MessageHandle(messages, (out, shard))

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """Receive the peers' rows of this rank's chunk in ``stage``; ``wait`` adds them."""
        parts = []
        with self._messages("reduce-scatter") as messages:
            sent, me, peers = full.view(self.size, -1), self.rank, self._peers()
            rows = list(stage[: full.numel() - out.numel()].view(self.size - 1, -1))
            rows.insert(me, sent[me])
            cuts = [(cut, self._tag("s", sent[me][cut])) for cut in pieces(out)]
            for cut, tag in cuts:
                arrivals = {peer: messages.receive(rows[peer][cut], peer, tag) for peer in peers}
                parts.append(GlooSum(out[cut], [row[cut] for row in rows], arrivals, add))
            for cut, tag in cuts:
                for peer in peers:
                    messages.send(sent[peer][cut], peer, tag)
        return MessageHandle(messages, (full, stage), parts)

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """gloo's ring, in place."""
        with self._naming("all-reduce") as describe:
            work = dist.all_reduce(buffer, group=self.open_group(describe), async_op=True)
            return RingHandle(describe, [work], self)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """Receive each chunk at its place in ``out``. Empty chunks are not sent."""
        to, into = chunks(full, self.size, send), chunks(out, self.size, receive)
        with self._messages("all-to-all") as messages:
            tag, peers = self._tag("a", out[:0]), self._peers()
            for peer in peers:
                if into[peer].numel():
                    messages.receive(into[peer], peer, tag)
            for peer in peers:
                if to[peer].numel():
                    messages.send(to[peer], peer, tag)
        into[self.rank].copy_(to[self.rank])
        return MessageHandle(messages, (out, full))

    def close(self, reason: str = "") -> Any:
        """Take no more collectives. Returns the process group, which the caller destroys; None if that was done.

        Its connections close when it is destroyed and no message is in flight.
        """
        if reason and self.key and not self.closed:
            self.watchdog.notes.leave(f"{self.key}/{self.rank}", reason)
        self.closed = reason or CLOSED
        group, self.group = self.group, None
        return group

    def open_group(self, describe: str) -> Any:
        """The process group, read once, since another thread may close the communicator: None is the default group.

        Raises:
            CommError: the communicator is closed.
        """
        group = None if self.closed else self.group
        if group is None:
            raise CommError(f"{describe} failed: it is closed: {self.closed}")
        return group

    def unreachable(self) -> list[int]:
        """The ranks whose connections are closed: sending to them fails at once. None where this end is closed."""
        out = []
        for peer in self._peers():
            try:
                self.open_group("a message").send([empty(1)], peer, TURNS * KINDS - 1)
            except CommError:
                return []
            except RuntimeError:
                out.append(self.ranks[peer])
        return out

    @contextmanager
    def _messages(self, call: str) -> Iterator["Messages"]:
        """A collective's messages, which are sent and received inside.

        A peer that has left is an error of ``wait``: what it sent before may still be wanted, and it wants no more.
        """
        messages = Messages(self, f"{call} on {self.name}")
        self.open_group(messages.describe)
        try:
            with self._naming(call), messages:
                yield messages
        except CommError as error:
            messages.failed = error

    @contextmanager
    def _naming(self, call: str) -> Iterator[str]:
        describe = f"{call} on {self.name}"
        try:
            with naming_errors(describe):
                yield describe
        except CommError as error:
            if self.closed:
                raise
            # A peer had closed its connections before.
            left = {peer: reason for peer in self._peers() if (reason := self.reason(peer))}
            told = "; ".join(f"rank {self.ranks[peer]} gave up: {reason}" for peer, reason in left.items())
            raise CommError(f"{error}; {told}" if told else str(error)) from error

    def explaining(self) -> AbstractContextManager[None]:
        """Errors of a wait inside quote what each rank was calling."""
        if self.forked:
            raise CommError(f"waiting on {self.name} failed: {self.forked}")
        return self.watchdog.explaining(self.ranks, self.fatal)

    def reason(self, peer: int) -> str:
        """Say why a peer has closed this communicator; empty if it has not, or left no note."""
        return self.watchdog.notes.reason_of(f"{self.key}/{peer}") if self.key else ""

    def _tag(self, call: str, part: Tensor) -> int:
        return next(self.numbers) % TURNS * KINDS + crc32(f"{call}{part.nbytes}".encode()) % KINDS

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that ranks do not all begin with the same peer."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class Messages:
    """The messages of a collective in flight.

    A message keeps its connections open, also those to other peers. So no frame holds one: the traceback of an error
    would, while this rank meets the others, of which some still wait for this one to close its connections.
    """

    def __init__(self, comm: GlooCommunicator, describe: str) -> None:
        self.comm, self.describe = comm, describe
        self.works: list[Any] = []
        self.peers: list[int] = []
        self.failed: CommError | None = None

    def send(self, part: Tensor, peer: int, tag: int) -> None:
        """Send to a peer."""
        hand_over()  # gloo's thread may have to read that the peer is ready: then the message goes at once
        self._begin("send", part, peer, tag)

    def receive(self, part: Tensor, peer: int, tag: int) -> int:
        """Receive from a peer: the number of the message."""
        self._begin("recv", part, peer, tag)
        return len(self.works) - 1

    def _begin(self, call: str, part: Tensor, peer: int, tag: int) -> None:
        """Begin a message. It fails at once where the peer's connection is closed."""
        try:
            self.works.append(getattr(self.comm.open_group(self.describe), call)([part], peer, tag))
        except RuntimeError:
            with naming_errors(self.describe, self.comm.ranks[peer]):
                raise
        self.peers.append(peer)

    def wait(self, number: int) -> None:
        """Wait for a message, unless that was done."""
        if self.works[number] is None:
            return
        peer, waits, me = self.peers[number], self.comm.watchdog.waits, get_ident()
        rank = self.comm.ranks[peer]
        try:
            with naming_errors(self.describe, rank):
                waits[me] = self.describe, rank
                self.works[number].wait()
                self.works[number] = None
        except CommError as error:
            # The peer may have lost another rank: a rank that gives up closes its connections, like one that dies.
            reason = self.comm.reason(peer)
            raise CommError(f"{error}; it gave up: {reason}" if reason else str(error)) from error
        finally:
            del waits[me]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.works.clear()


@dataclass(frozen=True)
class RingHandle:
    """The handle of a sum by gloo's ring, whose errors do not name the lost rank."""

    describe: str
    works: list[Any]
    comm: GlooCommunicator

    def wait(self) -> None:
        """Wait as long as the communicator's timeout."""
        with self.comm.explaining():
            try:
                with self.comm.watchdog.waiting(self.describe), naming_errors(self.describe):
                    self.works[0].wait()
            except CommError as error:
                lost = " and ".join(f"rank {rank}" for rank in self.comm.unreachable())
                told = f"{lost} cannot be reached" if lost else f"one of the ranks {list(self.comm.ranks)} did not come"
                raise CommError(f"{error} ({told})") from error
            finally:  # it keeps connections open, even in the traceback of an error
                self.works.clear()


@dataclass(frozen=True)
class GlooSum:
    """A sum of rows, some of which are still in flight: ``arrivals`` are the numbers of their messages by rank."""

    out: Tensor
    rows: Sequence[Tensor]
    arrivals: Mapping[int, int]
    add: bool

    def finish(self, wait: Callable[[int], None]) -> None:
        """Add the rows in the order of ranks, each when it has arrived. ``out`` may be the first received row."""
        sum_rows(self.out, self._arriving(wait), self.add)

    def _arriving(self, wait: Callable[[int], None]) -> Iterator[Tensor]:
        for rank, row in enumerate(self.rows):
            if rank in self.arrivals:
                wait(self.arrivals[rank])
            yield row


@dataclass(frozen=True)
class MessageHandle:
    """The handle of a collective that is made of messages, with sums to compute when they arrive.

    gloo knows only addresses, so ``tensors`` keeps the memory behind them.
    """

    messages: Messages
    tensors: Sequence[Tensor]
    sums: Sequence[GlooSum] = ()

    def wait(self) -> None:
        """Wait for each message, at most as long as the communicator's timeout."""
        with self.messages.comm.explaining(), self.messages:
            if self.messages.failed is not None:
                raise self.messages.failed
            for part in self.sums:
                part.finish(self.messages.wait)
            for number in range(len(self.messages.works)):
                self.messages.wait(number)
            self.messages.works.clear()


def pieces(chunk: Tensor) -> list[slice]:
    """Equal pieces of a chunk, none above ``PIECE`` bytes."""
    number = max(1, -(-chunk.nbytes // PIECE))
    width = -(-chunk.numel() // number)
    return [slice(at, min(at + width, chunk.numel())) for at in range(0, chunk.numel(), width)]
