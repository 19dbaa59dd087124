"""Communicators between the ranks of one host: through memory that they share (``mail.py``).

Against gloo on the loopback interface this saves the system calls, the copies into and out of the kernel, and gloo's
threads. NCCL and MPI do the same between the processes of a host. All is done by the caller: a copy when a collective
is issued, another, or the sum, when it is waited for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from fshard.errors import CommError
from fshard.runtime.comm.communicator import Events, Handle, Sizes, chunks, sum_rows
from fshard.runtime.comm.links import Link
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.shared_memory import SharedMemory
from fshard.runtime.comm.watchdog import Watchdog


class HostCommunicator:
    """A communicator of ranks on one host.

    Args:
        name: for errors.
        rank: this rank's position.
        links: to the other ranks, by position; None at this one's own.
        ranks: the rank in the mesh of each position, for errors.
        watchdog: sees the waits that last, and says how long a rank waits for a peer.
        fatal: whether no rank can go on when a wait has failed.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        links: Sequence[Link | None],
        ranks: Sequence[int],
        watchdog: Watchdog,
        fatal: bool = True,
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(links)
        self.ranks, self.watchdog, self.fatal = ranks, watchdog, fatal
        self.memory = SharedMemory(links, ranks, watchdog)
        self.numbers = count()
        self.order = [(rank + step) % self.size for step in range(1, self.size)]

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = ()) -> Handle:
        """Each rank copies the peers' shards to their places."""
        rows, number, describe = out.view(self.size, -1), next(self.numbers), f"all-gather on {self.name}"

        def finish() -> None:
            for at in self.order:
                with self.memory.part(at, number, b"g", shard) as part:
                    rows[at].copy_(part)

        with self.failing(describe):
            self.memory.publish(number, b"g", dict.fromkeys(self.order, shard))
        rows[self.rank].copy_(shard)
        return HostHandle(self, describe, finish)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = ()) -> Handle:
        """Each rank adds its chunk of all ranks' tensors, in their order. ``stage`` is not needed."""
        number, describe = next(self.numbers), f"reduce-scatter on {self.name}"
        rows = full.view(self.size, -1).unbind()
        with self.failing(describe):
            self.memory.publish(number, b"s", {at: rows[at] for at in self.order})
        return HostHandle(self, describe, lambda: sum_rows(out, self._rows(number, b"s", rows[self.rank]), add))

    def all_reduce(self, buffer: Tensor, after: Events = ()) -> Handle:
        """Each rank adds all ranks' buffers, in their order."""
        flat, number, describe = buffer.view(-1), next(self.numbers), f"all-reduce on {self.name}"
        with self.failing(describe):
            self.memory.publish(number, b"r", dict.fromkeys(self.order, flat))
        return HostHandle(self, describe, lambda: sum_rows(flat, self._rows(number, b"r", flat.clone()), False))

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = ()) -> Handle:
        """Each rank copies what peers have for it."""
        number, describe = next(self.numbers), f"all-to-all on {self.name}"
        to, into = chunks(full, self.size, send), chunks(out, self.size, receive)
        parts = {at: to[at] for at in self.order if to[at].numel()}

        def finish() -> None:
            for at in self.order:
                if into[at].numel():
                    with self.memory.part(at, number, b"a", into[at]) as part:
                        into[at].copy_(part)

        with self.failing(describe):
            if parts:
                self.memory.publish(number, b"a", parts)
        into[self.rank].copy_(to[self.rank])
        return HostHandle(self, describe, finish)

    def close(self, reason: str = "") -> None:
        """Close the links, and tell peers why."""
        self.memory.close(reason)

    def _rows(self, number: int, call: bytes, mine: Tensor) -> Iterator[Tensor]:
        """The parts of all ranks, in their order. They are valid until the last one was taken."""
        with ExitStack() as parts:
            for at in range(self.size):
                yield mine if at == self.rank else parts.enter_context(self.memory.part(at, number, call, mine))

    @contextmanager
    def failing(self, describe: str) -> Iterator[None]:
        """A communicator that fails is closed, so that peers that wait for this rank fail too, not time out."""
        try:
            with naming_errors(describe):
                yield
        except BaseException as error:  # whatever it was, the parts that are left would not be taken
            self.close(f"{type(error).__name__}: {error}")
            if isinstance(error, CommError):
                self.watchdog.explain(error, self.ranks, self.fatal)
            raise


@dataclass(frozen=True)
class HostHandle:
    """The handle of a collective whose rest is done by ``wait``."""

    comm: HostCommunicator
    describe: str
    finish: Callable[[], None]

    def wait(self) -> None:
        """Take what peers have published, as soon as they have."""
        with self.comm.failing(self.describe):
            self.finish()
