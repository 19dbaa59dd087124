"""Units of a function under forward derivatives of any nesting, of which no gradient is taken.

The call of a unit leaves the transforms around the function for as long as the engine makes its groups readable, and
enters them again for the unit's own code.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fshard import tree
from fshard.model.unit import Unit
from fshard.runtime.memory.slots import storage_of
from fshard.torch_internals import below_transforms, forward_parts, functorch, within_transforms
from fshard.transform.dual_units import Pair, TransformedUnits, alone, make_dual, refuse_views

Maker = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Makes a tensor of the transforms around a function, of a leaf and its tangents. Under more than one transform it
copies the tangents: a result of a unit may be a view of one, whose memory will hold another unit's."""


class ForwardUnits(TransformedUnits):
    """Runs units under forward derivatives.

    Args:
        pairs: each leaf, and its tangents.
        make: makes a leaf with tangents.
        known: the units made so far.
    """

    def __init__(self, pairs: Mapping[str, Pair], make: Maker, known: dict[Unit, Unit]) -> None:
        super().__init__(pairs)
        self.make, self.known = make, known

    def dual(self, pair: Pair) -> Tensor:
        """A leaf with its tangents."""
        with below_transforms():
            primal, tangents = _alone(pair)
        return self.make(primal, tangents) if tangents else primal

    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit."""
        if (made := self.known.get(unit)) is None:
            made = self.known[unit] = Unit(unit.name, EnteringFunction(unit))
        params = {"at": [one for one, _ in held], "along": [along for _, along in held]}
        with below_transforms() as layers:
            entry = UnitEntry(self, layers, given)
            engine.call(made, params, (entry,), {})
        return entry.result


class UnitEntry:
    """A call of a unit, as one value in which the engine looks for no tensors.

    Args:
        units: what runs it.
        layers: the transforms around it.
        given: its parameters and arguments under these.

    Attributes:
        result: the result, likewise under these.
    """

    def __init__(self, units: ForwardUnits, layers: list[Any], given: Any) -> None:
        self.units, self.layers, self.given = units, layers, given
        self.result: Any = None


class EnteringFunction:
    """A unit's function that enters transforms, and leaves its result there."""

    def __init__(self, unit: Unit) -> None:
        self.fn, self.__name__ = unit.fn, getattr(unit.fn, "__name__", "unit")

    def __call__(self, read: Any, entry: UnitEntry) -> tuple[()]:
        """Run the unit. Raises UnitError if a result is a view of a leaf."""
        params, args, kwargs = entry.given
        pairs, make = [*map(_alone, zip(read["at"], read["along"], strict=True))], entry.units.make
        with within_transforms(entry.layers):
            leaves = [make(primal, tangents) if tangents else primal for primal, tangents in pairs]
            out = self.fn(tree.unflatten(tree.flatten(params)[1], leaves), *args, **kwargs)
            if entry.units.depth == 1:
                views = {storage_of(x) for _, tangents in pairs for x in tangents}
                out = tree.mapped(lambda x: _copied(x, views) if isinstance(x, Tensor) else x, out)
        found = [data_of(x) for x in tree.leaves(out) if isinstance(x, Tensor)]
        refuse_views(self.__name__, found, [primal for primal, _ in pairs])
        entry.result = out
        return ()


def _alone(pair: Pair) -> tuple[Tensor, list[Tensor]]:
    return alone(pair[0].detach()), [alone(x) for x in pair[1]]


def _copied(x: Tensor, views: set[int | None]) -> Tensor:
    """A result whose tangent is no view of one that a unit was given."""
    if not x.is_floating_point():
        return x
    primal, tangent = forward_parts(x, 1)
    return x if tangent is None or storage_of(tangent) not in views else make_dual(primal, tangent.clone())


def data_of(x: Tensor) -> Tensor:
    """The data of a tensor that transforms wrap, without tangents."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x
