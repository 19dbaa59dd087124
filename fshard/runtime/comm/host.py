"""Communicators between the ranks of one host, through shared memory (``shared_memory.py``).

Compared with gloo on the loopback interface this saves system calls, copies into and out of the kernel, and gloo's
threads. NCCL and MPI do the same between processes of a host. The calling thread does all the work: a copy when it
issues a collective, and another copy, or the sum, when it waits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count

from torch import Tensor

from fshard.errors import CommError
from fshard.runtime.comm.communicator import Events, Handle, Sizes, chunks
from fshard.runtime.comm.links import PeerLink
from fshard.runtime.comm.pending import naming_errors
from fshard.runtime.comm.row_sums import sum_rows
from fshard.runtime.comm.shared_memory import SharedMemory
from fshard.runtime.comm.watchdog import Watchdog


class HostCommunicator:
    """A communicator of ranks on one host.

    Args:
        name: the name in errors.
        rank: this rank's position.
        links: to the other ranks, by position; None at this rank's own.
        ranks: the rank in the mesh of each position, for errors.
        watchdog: sees long waits, and has the timeout.
        fatal: whether no rank can continue after a failed wait.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        links: Sequence[PeerLink | None],
        ranks: Sequence[int],
        watchdog: Watchdog,
        fatal: bool = True,
    ) -> None:
        self.name, self.rank, self.size = name, rank, len(links)
        self.ranks, self.watchdog, self.fatal = ranks, watchdog, fatal
        self.memory = SharedMemory(links, ranks, watchdog)
        self.numbers = count()
        self.order = [(rank + step) % self.size for step in range(1, self.size)]

    def all_gather(self, out: Tensor, shard: Tensor, after: Events = None) -> Handle:
        """Copy the peers' shards to their places in ``out``."""
        rows, number, describe = out.view(self.size, -1), next(self.numbers), f"all-gather on {self.name}"

        def finish() -> None:
            for at in self.order:
                with self.memory.part(at, number, b"g", shard) as part:
                    rows[at].copy_(part)

        failed = self._publish(describe, number, b"g", dict.fromkeys(self.order, shard))
        rows[self.rank].copy_(shard)
        return HostHandle(self, describe, finish, failed)

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Events = None) -> Handle:
        """Add this rank's chunks of all ranks' tensors, in rank order. ``stage`` is not used."""
        number, describe = next(self.numbers), f"reduce-scatter on {self.name}"
        rows = full.view(self.size, -1).unbind()
        failed = self._publish(describe, number, b"s", {at: rows[at] for at in self.order})
        mine = rows[self.rank]
        return HostHandle(self, describe, lambda: sum_rows(out, self._rows(number, b"s", mine), add), failed)

    def all_reduce(self, buffer: Tensor, after: Events = None) -> Handle:
        """Add all ranks' buffers, in rank order."""
        flat, number, describe = buffer.view(-1), next(self.numbers), f"all-reduce on {self.name}"
        failed = self._publish(describe, number, b"r", dict.fromkeys(self.order, flat))
        return HostHandle(self, describe, lambda: sum_rows(flat, self._rows(number, b"r", flat.clone()), False), failed)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Events = None) -> Handle:
        """Copy the peers' chunks for this rank."""
        number, describe = next(self.numbers), f"all-to-all on {self.name}"
        to, into = chunks(full, self.size, send), chunks(out, self.size, receive)
        parts = {at: to[at] for at in self.order if to[at].numel()}

        def finish() -> None:
            for at in self.order:
                if into[at].numel():
                    with self.memory.part(at, number, b"a", into[at]) as part:
                        into[at].copy_(part)

        failed = self._publish(describe, number, b"a", parts) if parts else None
        into[self.rank].copy_(to[self.rank])
        return HostHandle(self, describe, finish, failed)

    def close(self, reason: str = "") -> None:
        """Close the links, and send peers the reason."""
        self.memory.close(reason)

    def _publish(self, describe: str, number: int, call: bytes, parts: Mapping[int, Tensor]) -> CommError | None:
        """Let peers read their parts. Returns what has failed.

        A peer that has left is an error of ``wait``: what it sent before may still be wanted, and it wants no more.
        """
        try:
            with naming_errors(describe):
                self.memory.publish(number, call, parts)
        except CommError as error:
            return error
        except BaseException as error:
            self.close(f"{type(error).__name__}: {error}")
            raise
        return None

    def _rows(self, number: int, call: bytes, mine: Tensor) -> Iterator[Tensor]:
        """The parts of all ranks, in rank order. They are valid until the iterator ends."""
        with ExitStack() as parts:
            for at in range(self.size):
                yield mine if at == self.rank else parts.enter_context(self.memory.part(at, number, call, mine))

    @contextmanager
    def failing(self, describe: str) -> Iterator[None]:
        """Close a communicator that fails, so that peers that wait for this rank fail, too, and do not time out."""
        with self.watchdog.explaining(self.ranks, self.fatal):
            try:
                with naming_errors(describe):
                    yield
            except BaseException as error:  # after any error the remaining parts would not be read
                self.close(f"{type(error).__name__}: {error}")
                raise


@dataclass(frozen=True)
class HostHandle:
    """The handle of a collective that ``wait`` finishes."""

    comm: HostCommunicator
    describe: str
    finish: Callable[[], None]
    failed: CommError | None = None

    def wait(self) -> None:
        """Wait for the parts of peers, and copy or add them. Raises what failed at the start."""
        with self.comm.failing(self.describe):
            if self.failed is not None:
                raise self.failed
            self.finish()
