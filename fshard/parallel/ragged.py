"""Dispatch without a capacity: every choice is sent, in unequal numbers of rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fshard import collectives
from fshard.collectives.linear import is_fake
from fshard.parallel.routing import Routing
from fshard.sharding.mesh import Mesh


@dataclass(frozen=True)
class Ragged:
    """The way of rows to this rank's experts, for the way back.

    Attributes:
        order: (choices,) int64: the choice of each row sent; a token's choices are neighbours.
        arrival: (rows,) int64: the number, among the rows that arrived, of each row ordered by expert.
        sent, received: rows to and from each rank.
        weights: (choices,): the factors on results.
        shape: of the tokens and their choices.
    """

    order: Tensor
    arrival: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    weights: Tensor
    shape: tuple[int, ...]
    axis: str | None
    mesh: Mesh | None

    def back(self, rows: Tensor) -> Tensor:
        """From experts to tokens."""
        rows = rows[_inverse(self.arrival)]
        if self.axis is not None:
            rows = collectives.ragged_all_to_all(rows, self.axis, self.received, self.sent, mesh=self.mesh)
        rows = rows[_inverse(self.order)] * self.weights.unsqueeze(-1).to(rows.dtype)
        return rows.reshape(*self.shape, rows.shape[-1]).sum(-2)


def dispatch_ragged(
    x: Tensor, routing: Routing, axis: str | None, mesh: Mesh | None
) -> tuple[Tensor, tuple[int, ...], Ragged]:
    """This rank's rows, ordered by expert, the number of each expert's rows, and the way back."""
    shape, chosen = tuple(routing.chosen.shape), routing.chosen.reshape(-1)
    parts = 1 if axis is None else collectives.axis_size(axis, mesh=mesh)
    order = chosen.argsort(stable=True)
    rows = x.reshape(-1, x.shape[-1])[order // shape[-1]]
    mine = chosen.new_zeros(routing.experts).scatter_add(0, chosen, torch.ones_like(chosen)).view(parts, -1)
    theirs = mine if axis is None else collectives.all_to_all(mine, axis, 0, 0, tiled=True, mesh=mesh)
    sent, table = _read(mine, chosen.numel()), _read(theirs, chosen.numel())
    numbers, received = tuple(map(sum, sent)), tuple(map(sum, table))
    if axis is not None:
        rows = collectives.ragged_all_to_all(rows, axis, numbers, received, mesh=mesh)
    # From each rank rows arrive ordered by expert: a stable sort by expert orders them by expert, then by rank.
    local = torch.arange(theirs.shape[1], device=x.device).repeat(parts)
    counts = torch.tensor(table, device=x.device).reshape(-1) if is_fake(theirs) else theirs.reshape(-1)
    arrival = local.repeat_interleave(counts, output_size=sum(received)).argsort(stable=True)
    way = Ragged(order, arrival, numbers, received, routing.weights.reshape(-1), shape, axis, mesh)
    return rows[arrival], tuple(map(sum, zip(*table, strict=True))), way


def _read(counts: Tensor, total: int) -> list[list[int]]:
    """Numbers of rows as ints. A trace on fake tensors assumes numbers as equal as possible."""
    if not is_fake(counts):
        rows: list[list[int]] = counts.tolist()
        return rows
    parts, experts = counts.shape
    share, left = divmod(total, parts * experts)
    return [[share + (at * experts + number < left) for number in range(experts)] for at in range(parts)]


def _inverse(order: Tensor) -> Tensor:
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter(0, order, places)
