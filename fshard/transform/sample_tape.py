"""The gradients of single samples that one backward leaves, and their norms and sums.

The gradient of a sample by the weight of a linear layer is ``G.T @ X``, for the inputs ``X`` and the gradients of the
outputs ``G`` at the sample's positions. Its squared norm is ``((G @ G.T) * (X @ X.T)).sum()`` (Goodfellow, "Efficient
per-example gradient computations", 2015; Li et al., "Large language models can be strong differentially private
learners", 2022), and a weighted sum over samples is one product of matrices. So layers keep ``X`` and ``G``, and the
backward frees all else (Bu et al., "Differentially private optimization on large model at small cost", 2023).
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Flat = dict[str, Tensor]
Place = tuple[str, int]
"""A call of a unit: its name and number. Code outside of units has no name."""

OUTSIDE: Place = "", 0


class LayerPart(NamedTuple):
    """The gradients of samples by a leaf, from one call of a layer.

    Attributes:
        kind: ``held``: ``left`` is the gradients; ``linear``: they are the product of the others, summed over
            positions; or ``embedding``: gradients by indices.
        left: ``(rows, *shape)``; of a linear layer ``(rows, positions, width)``; of an embedding the indices,
            ``(rows, positions)``.
        right: ``(rows, positions, width)``; None beside gradients.
    """

    kind: str
    left: Tensor
    right: Tensor | None = None

    def held(self, leaf: Tensor) -> Tensor:
        """The gradient of each sample, ``(rows, *shape)``."""
        if self.right is None:
            return self.left
        if self.kind == "linear":  # products of one term each are no work for a product of matrices
            return self.left.mT @ self.right if self.left.shape[1] != 1 else self.left.mT * self.right
        rows = len(self.left)
        at = self.left + torch.arange(rows, device=self.left.device).unsqueeze(1) * len(leaf)
        return self._scattered(at, self.right, rows * len(leaf)).view(rows, *leaf.shape)

    def summed(self, leaf: Tensor, factor: Tensor) -> Tensor:
        """The sum of the samples' gradients, each times its factor. Samples without a factor do not count."""
        left = self.left[: len(factor)]
        if self.right is None:
            total: Tensor = torch.tensordot(factor.to(left), left, 1)
            return total
        weighted = self.right[: len(factor)] * factor.to(self.right).view(-1, 1, 1)
        if self.kind == "linear":
            return left.flatten(0, 1).mT @ weighted.flatten(0, 1)
        return self._scattered(left, weighted, len(leaf))

    @staticmethod
    def _scattered(at: Tensor, values: Tensor, count: int) -> Tensor:
        values = values.flatten(0, 1)
        return values.new_zeros(count, values.shape[-1]).index_add(0, at.flatten(), values)


Parts = dict[Any, list[LayerPart]]
"""Parts of the gradients of samples that a call has left, by path; where no engine calls, by the leaf's number."""


@dataclass(eq=False)
class SampleTape:
    """The gradients of single samples that a backward has left.

    Attributes:
        ghosts: whether layers keep what their gradients are made of, in the place of these.
        rows: the number of samples.
        calls: what each call of a unit has left.
        trial: what the latest call of a unit's function without an engine has left.
    """

    ghosts: bool
    rows: int = 0
    calls: dict[Place, Parts] = field(default_factory=dict)
    trial: Parts = field(default_factory=dict)

    def begin(self, rows: int) -> None:
        """Discard everything, for a backward of so many samples."""
        self.rows = rows
        self.calls.clear()

    def _parts(self, place: Place | None, path: Any) -> list[LayerPart]:
        left = self.trial if place is None else self.calls.setdefault(place, {})
        return left.setdefault(path, [])

    def hold(self, place: Place | None, path: Any, grad: Tensor) -> None:
        """Add gradients of samples."""
        parts = self._parts(place, path)
        for number, part in enumerate(parts):
            if part.kind == "held":
                parts[number] = LayerPart("held", part.left + grad)
                return
        parts.append(LayerPart("held", grad))

    def put(self, place: Place | None, path: Any, leaf: Tensor, part: LayerPart) -> None:
        """Take what the gradients of samples are made of."""
        if self.ghosts:
            self._parts(place, path).append(part)
        else:
            self.hold(place, path, part.held(leaf))

    def tried(self) -> Parts:
        """Return what the latest call without an engine has left, by the number of the leaf. It is left out then."""
        found, self.trial = self.trial, {}
        return found

    def keep(self, place: Place, paths: Sequence[str], left: Parts) -> None:
        """Take what the graph of a call has left."""
        self.calls[place] = {paths[number]: parts for number, parts in left.items()}

    def norms(self, shapes: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The norm of each sample's gradient over all leaves, ``(rows,)``, given a tensor like each leaf."""
        found = []
        for path, leaf in shapes.items():
            parts = [part for left in self.calls.values() for part in left.get(path, ())]
            if len({part.kind for part in parts}) > 1:
                parts = [LayerPart("held", part.held(leaf)) for part in parts]
            if parts:
                found.append(_squares(parts, leaf, dtype))
        return torch.stack(found).sum(0).sqrt() if found else torch.zeros(self.rows, dtype=dtype, device=device)

    def summed(self, place: Place, shapes: Mapping[str, Tensor], factor: Tensor) -> Flat:
        """The sum of what a call has left of the samples' gradients, each times its factor. It is left out then."""
        left, out = self.calls.pop(place, {}), Flat()
        for path in list(left):
            out[path] = functools.reduce(torch.add, [part.summed(shapes[path], factor) for part in left.pop(path)])
        return out


def _squares(parts: Sequence[LayerPart], leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """The squared norm of each sample's gradient by a leaf, of parts of one kind."""
    kind = parts[0].kind
    if kind == "held":
        whole = parts[0].left if len(parts) == 1 else torch.stack([part.left for part in parts]).sum(0)
        return whole.reshape(len(whole), -1).to(dtype).square().sum(1)
    left = torch.cat([part.left for part in parts], 1) if len(parts) > 1 else parts[0].left
    slopes = [part.right for part in parts if part.right is not None]
    right = (torch.cat(slopes, 1) if len(slopes) > 1 else slopes[0]).to(dtype)
    places = right.shape[1]
    if kind == "linear":
        left = left.to(dtype)
        if places == 1:
            return left.square().sum((1, 2)) * right.square().sum((1, 2))
    if places * places <= leaf.numel():
        pairs = right @ right.mT
        same = left @ left.mT if kind == "linear" else left.unsqueeze(1) == left.unsqueeze(2)
        return (pairs * same).sum((1, 2))
    # Long sequences: one gradient after the other is less than products of all positions.
    one = [LayerPart(kind, left[i : i + 1], right[i : i + 1]) for i in range(len(right))]
    return torch.cat([part.held(leaf).square().sum().view(1) for part in one])


class Uses(NamedTuple):
    """The leaves of a layer's call, by path, and what takes their gradients.

    Attributes:
        tape: takes them.
        place: the call of a unit; None for one without an engine.
        weight: the path of the weight, or its number in such a call.
        bias: that of the bias; None if it has none.
    """

    tape: SampleTape
    place: Place | None
    weight: Any
    bias: Any = None

    def put(self, leaf: Tensor, part: LayerPart) -> None:
        """Take what the weight's gradient is made of."""
        self.tape.put(self.place, self.weight, leaf, part)

    def hold(self, grad: Tensor) -> None:
        """Take the weight's gradient."""
        self.tape.hold(self.place, self.weight, grad)

    def hold_bias(self, grad: Tensor, within: tuple[int, ...] = (1,)) -> None:
        """Take the bias's gradient, given that of the output and the dims of positions."""
        if self.bias is not None:
            summed = grad.sum(within) if any([grad.shape[dim] != 1 for dim in within]) else grad.squeeze(within)
            self.tape.hold(self.place, self.bias, summed)
