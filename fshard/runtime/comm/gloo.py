"""Lanes over gloo, made of point-to-point messages.

gloo's own reduce-scatter is an all-reduce: twice the bytes, finished inside ``wait``. Its all-gather and all-to-all
copy everything once more. Messages go from where data lie to where they are wanted: every rank sends each peer just
what that peer needs, all pairs at the same time, and adds what it receives in the order of ranks. These are the
fewest bytes there can be, no copies, and the same sum on every run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fshard.runtime.comm.lanes import Handle, Marks, Sizes, bring, cuts
from fshard.runtime.comm.pending import Pending, naming

PIECE = 4 << 20
"""Bytes of a message at most, where the receiver adds: one piece is added while the next arrives."""


@dataclass(frozen=True)
class GlooLane:
    """A gloo communicator.

    Each message has a tag of its own, the same on both sides because all ranks issue the collectives of a lane in one
    order; so no message is taken for another, whichever arrives first.
    """

    name: str
    size: int
    group: Any
    tags: Iterator[int] = field(default_factory=count)

    def all_gather(self, out: Tensor, shard: Tensor, after: Marks = ()) -> Handle:
        """The peers' shards are received where they belong."""
        rows, tag, me, peers = out.view(self.size, -1), next(self.tags), self.group.rank(), self._peers()
        with naming(f"all-gather on {self.name}") as describe:
            works = [self.group.send([shard], peer, tag) for peer in peers]
            works += [self.group.recv([rows[peer]], peer, tag) for peer in peers]
        rows[me].copy_(shard)
        return Messages(describe, works, (out, shard))

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Marks = ()) -> Handle:
        """The peers' rows of this rank's chunk are received in ``stage`` and added by ``wait``."""
        sent, me, peers = full.view(self.size, -1), self.group.rank(), self._peers()
        rows = list(stage[: full.numel() - out.numel()].view(self.size - 1, -1))
        rows.insert(me, sent[me])
        parts, works = [], []
        with naming(f"reduce-scatter on {self.name}") as describe:
            for cut in pieces(out):
                tag = next(self.tags)
                works += [self.group.send([sent[peer][cut]], peer, tag) for peer in peers]
                arrivals = {peer: self.group.recv([rows[peer][cut]], peer, tag) for peer in peers}
                parts.append(Sum(out[cut], [row[cut] for row in rows], arrivals, add))
        return Messages(describe, works, (full, stage), parts)

    def all_reduce(self, buffer: Tensor, after: Marks = ()) -> Handle:
        """gloo's ring, in place."""
        with naming(f"all-reduce on {self.name}") as describe:
            return Pending(dist.all_reduce(buffer, group=self.group, async_op=True), describe)

    def all_to_all(self, out: Tensor, full: Tensor, receive: Sizes, send: Sizes, after: Marks = ()) -> Handle:
        """Each chunk is received where it belongs; empty ones are not sent."""
        tag, me = next(self.tags), self.group.rank()
        to, into = cuts(full, self.size, send), cuts(out, self.size, receive)
        with naming(f"all-to-all on {self.name}") as describe:
            works = [self.group.send([to[peer]], peer, tag) for peer in self._peers() if to[peer].numel()]
            works += [self.group.recv([into[peer]], peer, tag) for peer in self._peers() if into[peer].numel()]
        into[me].copy_(to[me])
        return Messages(describe, works, (out, full))

    def _peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all begin with the same."""
        me = self.group.rank()
        return [(me + step) % self.size for step in range(1, self.size)]


@dataclass(frozen=True)
class Sum:
    """The sum of rows, some of which are still to arrive."""

    out: Tensor
    rows: Sequence[Tensor]
    arrivals: dict[int, Any]
    add: bool

    def finish(self) -> None:
        """Add in the order of ranks, each row as it arrives. ``out`` may be the first received row."""
        bring(self.out, self._arriving(), self.add)

    def _arriving(self) -> Iterator[Tensor]:
        for rank, row in enumerate(self.rows):
            if rank in self.arrivals:
                self.arrivals[rank].wait()
            yield row


@dataclass(frozen=True)
class Messages:
    """The messages of one collective: sums to make of what arrives, and what else is to be waited for.

    gloo knows addresses only: ``held`` keeps the tensors behind them.
    """

    describe: str
    works: Sequence[Any]
    held: Sequence[Tensor]
    sums: Sequence[Sum] = ()

    def wait(self) -> None:
        """Wait, for each message as long as the communicator's timeout."""
        with naming(self.describe):
            for part in self.sums:
                part.finish()
            for work in self.works:
                work.wait()


def pieces(chunk: Tensor) -> list[slice]:
    """Equal cuts of a chunk, none above ``PIECE`` bytes."""
    number = max(1, -(-chunk.nbytes // PIECE))
    width = -(-chunk.numel() // number)
    return [slice(at, min(at + width, chunk.numel())) for at in range(0, chunk.numel(), width)]
