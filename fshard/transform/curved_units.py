"""Units of a function under second derivatives along directions, as units of values and tangents.

The function runs under ``vmap`` of ``jvp`` of ``jvp``: a sample for each direction, along which both derivatives go. So
first derivatives by the outer one are those by the inner one, and a unit takes and returns three tensors in the place
of one: the value, which all samples share, and two derivatives with a row for each sample.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp

from fshard import tree
from fshard.model.unit import Unit
from fshard.torch_internals import batched, below_transforms, forward_parts, functorch
from fshard.transform.dual_units import (
    Pair,
    TransformedUnits,
    alone,
    joined,
    make_dual,
    of_moving,
    parted,
    refuse_views,
    traced_as,
    unmoved,
)

Maybe = Tensor | None


def curved_function(
    fn: Callable[..., Any],
    trained: tuple[bool, ...],
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tangents: list[tuple[Maybe, Maybe]],
) -> tuple[Any, Sequence[Maybe], Sequence[Maybe]]:
    """A unit's result, and the first and second derivatives of the tensors in it, with a row for each sample.

    Args:
        fn: the unit's function.
        trained: whether each of its parameters moves.
        params: its parameters, and the directions of those that move, all of one behind those of another.
        args: its other arguments.
        kwargs: those by keyword.
        tangents: both derivatives of the tensors among these; None for zeros.
    """
    leaves, spec = tree.flatten((params["at"], args, kwargs))
    leaves[: len(trained)] = [alone(x.detach()) for x in leaves[: len(trained)]]
    both = [*[(t, None) for t in _stacked(params["along"], trained)], *tangents]
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    moved = {i: t for i, t in zip(places, both, strict=True) if t[0] is not None}
    if not moved:
        result, none = unmoved(fn, len(trained), tree.unflatten(spec, leaves))
        return result, none, none
    of, structure = of_moving(fn, leaves, spec, moved)
    values = {i: leaves[i] for i in moved}
    first = {i: t for i, (t, _) in moved.items()}
    second = {i: t for i, (_, t) in moved.items() if t is not None}
    shared: Any = (None, None, 0, 0)  # no value depends on the sample
    found, others, slopes, curves = torch.vmap(functools.partial(_along, of, values), out_dims=shared)(first, second)
    refuse_views(getattr(fn, "__name__", "unit"), found, leaves[: len(trained)])
    return joined(structure[0], found, others), slopes, curves


def _stacked(along: list[Tensor], trained: tuple[bool, ...]) -> list[Maybe]:
    """The directions of each parameter, with a row for each sample; None for one that does not move."""
    count = len(along) // max(1, sum(trained))
    given = iter([torch.stack(along[i : i + count]) for i in range(0, len(along), max(1, count))])
    return [next(given) if one else None for one in trained]


def _along(
    of: Callable[..., Any], values: dict[int, Tensor], first: dict[int, Tensor], second: dict[int, Tensor]
) -> tuple[Any, Any, Any, Any]:
    """The results of a function at some values, and their first and second derivatives, given those of the values."""

    def slope(values: dict[int, Tensor], again: dict[int, Tensor]) -> Any:
        ahead = tuple({**first, **again}.values())
        found, slopes, others = jvp(of, tuple(values.values()), ahead, has_aux=True)  # type: ignore[misc]
        return (found, slopes), others

    again = {i: first[i] for i in second}
    (found, slopes), (_, curves), others = jvp(slope, (values, again), (first, second), has_aux=True)  # type: ignore[misc]
    return found, others, slopes, curves


class CurvedUnits(TransformedUnits):
    """Runs units under ``vmap`` of ``jvp`` of ``jvp``.

    Args:
        pairs: each leaf, and its directions.
        known: the units of values and tangents made so far.
        count: the number of directions.
    """

    def __init__(self, pairs: Mapping[str, Pair], known: dict[Any, Unit], count: int) -> None:
        super().__init__(pairs)
        self.known, self.count = known, count

    def dual(self, pair: Pair) -> Tensor:
        """A leaf with its directions. They are copied: the memory of a leaf will hold another one."""
        with below_transforms():
            leaf, along = alone(pair[0].detach()), torch.stack([*pair[1]]) if pair[1] else None
        return self._made(leaf, along, None)

    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit."""
        params, *rest = given
        leaves, spec = tree.flatten(rest)
        inputs = {i: self._taken(x) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        args, kwargs = tree.unflatten(spec, [inputs[i][0] if i in inputs else x for i, x in enumerate(leaves)])
        trained = tuple([bool(along) for _, along in held])
        if (made := self.known.get((unit, trained))) is None:
            function = traced_as(functools.partial(curved_function, unit.fn, trained), unit.fn)
            made = self.known[unit, trained] = Unit(unit.name, function)
        at = tree.unflatten(tree.flatten(params)[1], [one for one, _ in held])
        read = {"at": at, "along": [x for _, along in held for x in along]}
        with below_transforms():
            result, *both = engine.call(made, read, (args, kwargs, [t for _, *t in inputs.values()]), {})
            structure, found, others = parted(result)
        return joined(structure, [self._made(*x) for x in zip(found, *both, strict=True)], others)

    def _made(self, value: Tensor, first: Maybe, second: Maybe) -> Tensor:
        """A tensor of the transforms."""
        if first is None:
            return value
        with below_transforms(self.depth - 1):
            inner = make_dual(value, batched(first, self.depth - 2))
            moved = batched(first, self.depth - 2)
            moved = moved if second is None else make_dual(moved, batched(second, self.depth - 2))
        return make_dual(inner, moved)

    def _taken(self, x: Tensor) -> tuple[Tensor, Maybe, Maybe]:
        """The value of a tensor of the transforms, and both derivatives."""
        inner, moved = forward_parts(x, self.depth)
        with below_transforms(self.depth - 1):
            value, first = forward_parts(inner, self.depth - 1)
            second = None if moved is None else forward_parts(moved, self.depth - 1)[1]
        with below_transforms():
            rows = [None if t is None else self._rows(t) for t in (first, second)]
        return value, rows[0], rows[1]

    def _rows(self, x: Tensor) -> Tensor:
        """A derivative with a row for each sample."""
        if not functorch.is_batchedtensor(x):
            return x.expand(self.count, *x.shape)
        rows: Tensor = functorch.get_unwrapped(x)
        return rows.movedim(functorch.maybe_get_bdim(x), 0)


def data_of(x: Tensor) -> Tensor:
    """The data of a tensor that transforms wrap, without tangents."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x
