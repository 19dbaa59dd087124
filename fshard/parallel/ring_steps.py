"""The steps of ring attention: who sends to whom, and what is computed in each step."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.linear import Permute
from fshard.collectives.ranks import Ranks
from fshard.parallel.attention import AttentionMask

Part = tuple[slice, slice, bool]
"""The part of one step of the ring: queries, keys, and whether only below the diagonal."""


@dataclass(frozen=True)
class Ring:
    """The settings of one call of ring attention; without a group, of attention on one rank."""

    group: Ranks | None
    causal: bool
    scale: float

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size if self.group is not None else 1

    @property
    def index(self) -> int:
        """The place of this rank."""
        return self.group.index if self.group is not None else 0

    def send(self, x: Tensor) -> raw.Finish:
        """Start to send to the next rank; the result comes from the rank before."""
        size = self.size
        if self.group is None or size == 1:
            return lambda: x
        return Permute(self.group, tuple((i, (i + 1) % size) for i in range(size))).begin(x)

    def source(self, step: int) -> int:
        """The rank whose keys are here in a step."""
        return (self.index - step) % self.size

    def part(self, step: int, length: int) -> Part:
        """The part that this rank computes in a step."""
        everything, half = slice(None), length // 2
        source = self.source(step)
        if not self.causal or source == self.index:
            return everything, everything, self.causal
        # An earlier rank's early chunk of keys precedes all queries here, and its late chunk follows them. Both chunks
        # of a later rank lie between the two chunks of queries here.
        return (everything, slice(half), False) if source < self.index else (slice(half, None), everything, False)

    def seen(self, step: int, part: Part, documents: Tensor | None) -> AttentionMask:
        """The mask of a part. ``documents`` are those of all ranks' tokens, (batch, ranks, time)."""
        rows, columns, causal = part
        if documents is None:
            return AttentionMask(causal)
        return AttentionMask(causal, documents[:, self.index, rows], documents[:, self.source(step), columns])

    def turn(self, kv: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The keys and values of all ranks, this one's first; those of the next step travel meanwhile."""
        for step in range(self.size):
            arriving = self.send(kv) if step + 1 < self.size else None
            yield step, kv
            kv = arriving() if arriving is not None else kv
