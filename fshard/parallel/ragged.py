"""Dispatch to experts: without a capacity in unequal numbers of rows, with one in equally many slots an expert."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard import collectives
from fshard.collectives.linear import is_fake
from fshard.parallel.routing import Routing
from fshard.sharding.mesh import Mesh


@dataclass(frozen=True)
class Slotted:
    """The way of tokens to slots, for the way back.

    Attributes:
        place: (groups, choices x tokens) int64: the slot of each choice in its group; dropped choices have the number
            after the last slot.
        weights: (groups, choices, tokens): the factors on results.
        local: the number of this rank's experts.
        shape: of the tokens, without their width.
    """

    place: Tensor
    weights: Tensor
    local: int
    shape: tuple[int, ...]
    axis: str | None
    mesh: Mesh | None

    def back(self, rows: Tensor) -> Tensor:
        """From slots to tokens."""
        groups, choices, tokens = self.weights.shape
        width = rows.shape[-1]
        held = rows.view(self.local, -1, width)
        if self.axis is not None:
            held = collectives.all_to_all(held, self.axis, 1, 0, tiled=True, mesh=self.mesh)
        slots = held.view(held.shape[0], groups, -1, width).transpose(0, 1).flatten(1, 2)
        slots = torch.cat((slots, slots.new_zeros(groups, 1, width)), 1)
        found = slots.gather(1, self.place.unsqueeze(-1).expand(-1, -1, width)).view(groups, choices, tokens, width)
        mixed: Tensor = (found * self.weights.unsqueeze(-1).to(found.dtype)).sum(1)
        return mixed.reshape(*self.shape, width)


def dispatch_slots(
    x: Tensor, routing: Routing, axis: str | None, capacity: float, mesh: Mesh | None
) -> tuple[Tensor, tuple[int, ...], Slotted]:
    """The slots of this rank's experts as rows, the number of each expert's rows, and the way back."""
    shape, experts = tuple(x.shape[:-1]), routing.experts
    x = x if x.dim() == 3 else x.unsqueeze(0)
    groups, tokens, width = x.shape
    choices = routing.chosen.shape[-1]
    each = math.ceil(capacity * tokens * choices / experts)
    # First choices come before second choices, and earlier tokens before later ones.
    chosen = routing.chosen.reshape(groups, tokens, choices).transpose(1, 2).flatten(1)
    place = _places(chosen, experts, each)
    given = x.unsqueeze(1).expand(-1, choices, -1, -1).flatten(1, 2)
    slots = x.new_zeros(groups, experts * each + 1, width)
    slots = slots.scatter(1, place.unsqueeze(-1).expand(-1, -1, width), given)[:, :-1]
    held = slots.reshape(groups, experts, each, width).transpose(0, 1).flatten(1, 2)
    if axis is not None:
        held = collectives.all_to_all(held, axis, 0, 1, tiled=True, mesh=mesh)
    weights = routing.weights.reshape(groups, tokens, choices).transpose(1, 2)
    way = Slotted(place, weights, held.shape[0], shape, axis, mesh)
    return held.flatten(0, 1), (held.shape[1],) * held.shape[0], way


def _places(chosen: Tensor, experts: int, each: int) -> Tensor:
    """The slot of each choice (groups, n) in its group; ``experts * each`` for a dropped choice."""
    numbers = torch.arange(experts, device=chosen.device)
    mine = chosen.unsqueeze(-1) == numbers
    before = mine.cumsum(1).gather(2, chosen.unsqueeze(-1)).squeeze(-1) - 1
    return torch.where(before < each, chosen * each + before, experts * each)


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
