"""Pieces of one tensor from the ranks that hold them to the ranks that want them: one all-to-all.

What is sent follows from the pieces alone, which every rank knows of all, so nothing is negotiated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard.checkpoint.ranges import blocks, overlap
from fshard.collectives.group import Group as Ranks
from fshard.runtime.clock import marks
from fshard.sharding.layout import Piece


def positions(ranks: Ranks) -> list[int]:
    """The ranks of a group, ascending: a lane's own order."""
    return sorted(ranks.mesh.ranks(ranks.axes))


def transfer(
    ranks: Ranks, mine: Tensor, have: Sequence[Piece], want: Sequence[Piece], out: Tensor | None = None
) -> Tensor:
    """The piece that this rank wants, 1-D. Collective over ``ranks``.

    Args:
        ranks: who takes part; positions are theirs in ascending order of rank.
        mine: what this rank holds, 1-D.
        have: the piece of each position. Equal ones are copies, of which the receiver's own is taken, or any other.
        want: the piece of each position; together ``have`` must hold them. It may be empty.
        out: where the wanted piece goes, 1-D; None for memory of its own.
    """
    me, count = positions(ranks).index(ranks.mesh.rank), len(have)
    out = torch.empty(want[me].numel, dtype=mine.dtype, device=mine.device) if out is None else out
    sent = [_views(mine, have[me], want[to]) if _supplier(have, me, to) == me else [] for to in range(count)]
    places = [_places(out, want[me], have[of]) if _supplier(have, of, me) == of else [] for of in range(count)]
    for place, view in zip(places[me], sent[me], strict=True):  # what stays here passes no buffer
        place.copy_(view)
    sent[me] = places[me] = []
    if count == 1:
        return out
    send = [sum(view.numel() for view in views) for views in sent]
    receive = [sum(place.numel() for place in row) for row in places]
    flat = torch.cat([view.reshape(-1) for views in sent for view in views] or [mine[:0]])
    arrived = _all_to_all(ranks, flat, send, receive)
    at = 0
    for place in (place for row in places for place in row):
        place.copy_(arrived[at : at + place.numel()].view(place.shape))
        at += place.numel()
    return out


def _supplier(have: Sequence[Piece], holder: int, target: int) -> int:
    """Which of the positions that hold the same as one of them gives it to a target."""
    if have[target] == have[holder]:
        return target
    copies = [position for position, piece in enumerate(have) if piece == have[holder]]
    return copies[target % len(copies)]


def _views(held: Tensor, have: Piece, want: Piece) -> list[Tensor]:
    """What a holder has of a wanted piece: views of what it holds, block by block."""
    pairs = [(mine, overlap(mine, theirs)) for mine in blocks(have) for theirs in blocks(want)]
    return [mine.within(held, *box) for mine, box in pairs if box is not None]


def _places(out: Tensor, want: Piece, have: Piece) -> list[Tensor]:
    """Where in a wanted piece that goes, in the same order."""
    pairs = [(mine, overlap(mine, theirs)) for theirs in blocks(have) for mine in blocks(want)]
    return [mine.within(out, *box) for mine, box in pairs if box is not None]


def _all_to_all(ranks: Ranks, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
    """Data are only moved, so they travel as bytes, of whatever dtype they are."""
    out = torch.empty(sum(receive), dtype=flat.dtype, device=flat.device)
    width = flat.element_size()
    handle = ranks.lane.all_to_all(
        out.view(torch.uint8), flat.view(torch.uint8), _times(receive, width), _times(send, width), marks(flat.device)
    )
    handle.wait()
    return out


def _times(sizes: list[int], width: int) -> list[int]:
    return [size * width for size in sizes]
