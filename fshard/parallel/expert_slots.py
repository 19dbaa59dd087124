"""Dispatch with a capacity: every expert has equally many slots for each group, filled or empty."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard import collectives
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
