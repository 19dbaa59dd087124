"""Attention on one rank, with the logsumexp of its scores, which joins the parts of a softmax; and a ring's steps.

A mask, and scores where no fused kernel fits, exist for a tile of the queries at a time, so memory is linear in the
number of tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.linear import Permute, is_fake
from fshard.collectives.ranks import Ranks
from fshard.parallel.attention_kernels import AttentionKernel, kernel_for

MASKED, SCORED = 512, 256
"""The fewest queries of a tile of masks, and of scores."""


@dataclass(frozen=True)
class AttentionMask:
    """The keys that each query attends to.

    Attributes:
        causal: of as many queries as keys, each sees the keys up to its own place.
        queries, keys: the number of each one's document, (batch, queries) and (batch, keys). A query sees keys of its
            own document alone. None: all are of one document.
    """

    causal: bool
    queries: Tensor | None = None
    keys: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, seen: AttentionMask, scale: float) -> tuple[Tensor, Tensor]:
    """Attention, and the logsumexp of each query's scores, (batch, heads, queries) in float32 or better.

    ``q`` is (batch, heads, queries, width), ``k`` and ``v`` are (batch, kv heads, keys, width): each kv head serves
    equally many neighbouring heads. A query that sees no key has the output 0 and the logsumexp -inf.
    """
    masked = seen.keys is not None
    kernel = kernel_for(q, k, v, seen.causal, masked)
    if not masked and not kernel.whole:
        return kernel.forward(q, k, v, None, seen.causal, scale)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for rows, columns, mask in _tiles(q, k, seen, tile_rows(q, kernel)):
        bias = None if mask is None else _bias(mask, q.dtype)
        part, sums = kernel.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], bias, False, scale)
        if masked:  # kernels differ in what a query without keys gets
            assert mask is not None
            some = mask.any(-1)
            part, sums = part.masked_fill(~some.unsqueeze(-1), 0), sums.masked_fill(~some, -torch.inf)
        out[:, :, rows], lse[:, :, rows] = part, sums
    return out, lse


def attend_backward(
    queries: tuple[Tensor, ...], k: Tensor, v: Tensor, seen: AttentionMask, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """These keys' parts of the gradients of queries, keys and values.

    ``queries`` are the gradient of ``out``, then ``q``, ``out`` and ``lse``, the latter two over all keys; the other
    arguments are those of ``attend``. The parts of all keys add up to the gradients.
    """
    grad, q, out, lse = queries
    masked = seen.keys is not None
    kernel = kernel_for(q, k, v, seen.causal, masked)
    if not masked and not kernel.whole:
        return kernel.backward((grad, q, k, v, out, lse), None, seen.causal, scale)
    dq, dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    for rows, columns, mask in _tiles(q, k, seen, tile_rows(q, kernel)):
        bias = None if mask is None else _bias(mask, q.dtype)
        mine, here = [x[:, :, rows] for x in queries], (k[:, :, columns], v[:, :, columns])
        parts = kernel.backward((mine[0], mine[1], *here, mine[2], mine[3]), bias, False, scale)
        dq[:, :, rows] += parts[0]
        dk[:, :, columns] += parts[1]
        dv[:, :, columns] += parts[2]
    return dq, dk, dv


def visible(queries: Tensor | None, keys: Tensor | None, later: Tensor | None) -> Tensor | None:
    """The mask, (batch or 1, 1, queries, keys): keys of the query's document that are not later than it."""
    mask = None if later is None else ~later.expand(1, 1, *later.shape)
    if queries is None or keys is None:
        return mask
    same = (queries.unsqueeze(-1) == keys.unsqueeze(-2)).unsqueeze(1)
    return same if mask is None else same & mask


def tile_rows(q: Tensor, kernel: AttentionKernel) -> int:
    """The queries of a tile: beyond the fewest, a mask has as many elements as the keys, and so have scores."""
    return max(SCORED, q.shape[3]) if kernel.whole else max(MASKED, q.shape[1] * q.shape[3])


def _tiles(q: Tensor, k: Tensor, seen: AttentionMask, size: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Queries, the range of keys that they may see, and the mask of both; None where all keys are seen.

    ``size`` is the number of queries of a tile. On CPUs the range ends at the first and the last key that is seen, and
    tiles of no key are left out. Elsewhere the host would have to wait for the device to know.
    """
    count, keys = q.shape[2], k.shape[2]
    known = seen.keys is not None and q.device.type == "cpu" and not is_fake(seen.keys)
    for start in range(0, count, size):
        end = min(start + size, count)
        stop = end if seen.causal else keys
        later = (
            torch.ones(end - start, stop, dtype=torch.bool, device=q.device).triu(start + 1) if seen.causal else None
        )
        mine = None if seen.queries is None else seen.queries[:, start:end]
        mask = visible(mine, None if seen.keys is None else seen.keys[:, :stop], later)
        first, last = _range(mask) if known and mask is not None else (0, stop)
        if first < last:
            mask = None if mask is None else mask[..., first:last]
            yield slice(start, end), slice(first, last), mask


def _range(mask: Tensor) -> tuple[int, int]:
    """The range of keys that any query sees."""
    places = mask.flatten(0, -2).any(0).nonzero()
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers to add to scores: 0, or -inf for keys that are not seen."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


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
