"""Units of a loss function under one forward derivative, as units of parameters and tangents.

The loss function runs under ``torch.func.jvp``, and so does the code between its units. The call of a unit leaves that
transform: the engine runs an ordinary unit, of plain tensors, that takes inputs with their tangents, reads parameters
with theirs, and returns results with theirs. So the engine sees where each unit begins, forward and backward, and a
schedule can gather ahead and leave reductions in flight.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.func import jvp
from torch.utils.dlpack import from_dlpack

from fshard import tree
from fshard.errors import UnitError
from fshard.model.precision import Casting
from fshard.model.unit import Slot, Unit, slot_of
from fshard.runtime.engine.proxies import Proxy, make_proxy, opened
from fshard.runtime.memory.slots import storage_of
from fshard.torch_internals import (
    below_transforms,
    forward_parts,
    transforms_depth,
)

Pair = tuple[Tensor, Sequence[Tensor]]
"""A leaf and its tangents; none for a frozen one."""


def dual_function(
    fn: Callable[..., Any],
    trained: tuple[bool, ...],
    recorded: bool,
    params: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tangents: list[Tensor | None],
) -> tuple[Any, Sequence[Tensor | None]]:
    """A unit's result, and the tangents of the tensors in it that may have some, in their order.

    Args:
        fn: the unit's function.
        trained: whether each of its parameters has a tangent.
        recorded: whether gradients flow through tangents.
        params: its parameters, and their tangents.
        args: its other arguments.
        kwargs: those by keyword.
        tangents: those of the tensors among both; None for a zero.
    """
    leaves, spec = tree.flatten((params["at"], args, kwargs))
    leaves[: len(trained)] = map(alone, leaves[: len(trained)])
    given = iter([alone(t) for t in params["along"]])
    along = [*[next(given) if one else None for one in trained], *tangents]
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    moved = {i: t for i, t in zip(places, along, strict=True) if t is not None}
    if not moved:
        return unmoved(fn, len(trained), tree.unflatten(spec, leaves))
    of, structure = of_moving(fn, leaves, spec, moved)
    found, ahead, others = jvp(of, tuple([leaves[i] for i in moved]), tuple(moved.values()), has_aux=True)  # type: ignore[misc]
    refuse_views(getattr(fn, "__name__", "unit"), found, leaves[: len(trained)])
    return joined(structure[0], found, others), _lasting(ahead, along[: len(trained)], recorded)


Moving = Callable[..., tuple[list[Tensor], list[Tensor]]]
"""A unit of the leaves that move: the tensors of its result that may have tangents, and the others."""


def of_moving(
    fn: Callable[..., Any], leaves: Sequence[Any], spec: Any, moved: Mapping[int, Any]
) -> tuple[Moving, list["Structure"]]:
    """A unit as a function of those of its leaves that move, and a list that holds the structure of its result.

    Args:
        fn: the unit's function.
        leaves: those of its parameters, its arguments and those by keyword.
        spec: their structure.
        moved: the places of those that move.
    """
    structure: list[Structure] = []

    def of(*moving: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        filled = list(leaves)
        for i, x in zip(moved, moving, strict=True):
            filled[i] = x
        at, args, kwargs = tree.unflatten(spec, filled)
        made, found, others = parted(fn(at, *args, **kwargs))
        structure[:] = [made]
        return found, others

    return of, structure


def unmoved(fn: Callable[..., Any], count: int, given: Any) -> tuple[Any, list[None]]:
    """The result of a unit of so many leaves, nothing of which moves, and no tangents."""
    params, args, kwargs = given
    result = fn(params, *args, **kwargs)
    found = parted(result)[1]
    refuse_views(getattr(fn, "__name__", "unit"), found, tree.leaves(given)[:count])
    return result, [None] * len(found)


def _lasting(tangents: Sequence[Tensor], directions: Sequence[Tensor | None], recorded: bool) -> list[Tensor]:
    """Tangents of results; none is a view of the tangent of a parameter."""
    held = {storage_of(t) for t in directions if t is not None}
    own = [t.clone() if storage_of(t) in held else t for t in tangents]
    return own if recorded else [t.detach() for t in own]


Structure = tuple[Any, list[Any]]
"""The structure of a result, and its leaves, with ``_MOVES`` for each that may have a tangent."""

_MOVES = object()


def moves(x: Any) -> bool:
    """Tell whether a result may have a tangent."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def parted(result: Any) -> tuple[Structure, list[Tensor], list[Tensor]]:
    """A result's structure, the tensors in it that may have tangents, and the other tensors."""
    outs, spec = tree.flatten(result)
    rest = [_MOVES if moves(x) else x for x in outs]
    return (spec, rest), list(filter(moves, outs)), [x for x in rest if isinstance(x, Tensor)]


def joined(structure: Structure, found: Sequence[Any], others: Sequence[Tensor]) -> Any:
    """The result that ``parted`` has taken apart, of these tensors."""
    (spec, rest), moving, plain = structure, iter(found), iter(others)
    return tree.unflatten(
        spec, [next(moving) if x is _MOVES else next(plain) if isinstance(x, Tensor) else x for x in rest]
    )


def refuse_views(unit: str, found: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Refuse results of a unit that are views of its leaves.

    Raises:
        UnitError: one is.
    """
    held = {storage_of(x) for x in leaves}
    if any(storage_of(out) in held for out in found):
        raise UnitError(
            f"an output of unit {unit} is a view of one of its parameters, whose memory will hold another unit's "
            f"weights: return a copy (.clone()), or read the parameter where it is used"
        )


class Alone(torch.autograd.Function):
    """A tensor in a storage of its own, at the same memory.

    PyTorch gives a tangent the layout of its primal's storage, which for a leaf in an arena is the whole arena.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return from_dlpack(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def alone(x: Tensor) -> Tensor:
    """A tensor that is all of its storage."""
    if x.device.type not in ("cpu", "cuda"):  # tangents take more memory there
        return x
    if x.storage_offset() == 0 and x.untyped_storage().nbytes() == x.numel() * x.itemsize:
        return x
    made: Tensor = Alone.apply(x)  # type: ignore[no-untyped-call]
    return made


class TransformedUnits(ABC):
    """Stands in for an engine while a loss function runs under transforms, at one depth of these.

    Args:
        pairs: each leaf, and its tangents, as the engine has them, by path.

    Attributes:
        depth: the number of transforms around the loss function.
    """

    def __init__(self, pairs: Mapping[str, Pair]) -> None:
        self.pairs, self.depth = pairs, transforms_depth()
        self.duals: dict[str, Tensor] = {}
        self.slots: list[Slot] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Proxies, their slots and the modules that hold them form a cycle: without this, the graph would live until the
        # next garbage collection.
        self.duals.clear()
        for slot in self.slots:
            slot.instances.clear()

    def handles(self, shapes: Mapping[str, tuple[int, ...]], casting: Casting | None) -> dict[str, Tensor]:
        """A proxy for each leaf. ``shapes`` are those of whole leaves."""
        found = {}
        for path, (leaf, _) in self.pairs.items():
            self.slots.append(Slot(self, path, casting, shapes[path]))
            found[path] = make_proxy(self.slots[-1], leaf, leaf.shape, leaf.dtype, leaf.device)
        return found

    def leaf(self, path: str) -> Tensor:
        """A leaf that code between units reads, as a tensor of the transforms around the loss function."""
        if path not in self.duals:
            with below_transforms(self.depth):  # the code may have entered others
                self.duals[path] = self.dual(self.pairs[path])
        return self.duals[path]

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit: by the engine, or as code between units where that is no plain call of it."""
        args, kwargs = tree.mapped(opened, (args, kwargs))
        held = self._held(params)
        if transforms_depth() != self.depth or held is None:
            return unit.fn(tree.mapped(opened, params), *args, **kwargs)
        slot = slot_of(held[0][0])
        assert slot is not None
        return self.run(slot.engine, unit, held, (params, args, kwargs))

    @abstractmethod
    def dual(self, pair: Pair) -> Tensor:
        """A leaf with its tangents, under the transforms around the loss function."""

    @abstractmethod
    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit that reads these leaves, of its parameters and arguments, by the engine."""

    def _held(self, params: Any) -> list[Pair] | None:
        """The leaves of a unit, and their tangents; None if it is given others, or such that no gradient flows into."""
        leaves = tree.leaves(params)
        slots = [slot for leaf in leaves if isinstance(leaf, Proxy) and (slot := slot_of(leaf)) is not None]
        if len(slots) < len(leaves) or any([slot.stopped for slot in slots]):
            return None
        return [self.pairs[slot.path] for slot in slots]


class DualUnits(TransformedUnits):
    """Runs units under one forward derivative, in the graph of plain autograd.

    Args:
        pairs: each leaf, and its tangent.
        known: the units of parameters and tangents made so far.
        recorded: whether gradients flow through tangents.
    """

    def __init__(self, pairs: Mapping[str, Pair], known: dict[Any, Unit], recorded: bool = True) -> None:
        super().__init__(pairs)
        self.known, self.recorded = known, recorded

    def dual(self, pair: Pair) -> Tensor:
        """A leaf with its tangent."""
        with below_transforms(self.depth - 1):
            primal, tangents = alone(pair[0]), [alone(x) for x in pair[1]]
        return make_dual(primal, tangents[0]) if tangents else primal

    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit."""
        params, *rest = given
        leaves, spec = tree.flatten(rest)
        inputs = {i: forward_parts(x, self.depth) for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        args, kwargs = tree.unflatten(spec, [inputs[i][0] if i in inputs else x for i, x in enumerate(leaves)])
        trained = tuple([bool(along) for _, along in held])
        if (made := self.known.get((unit, trained))) is None:
            function = traced_as(functools.partial(dual_function, unit.fn, trained, self.recorded), unit.fn)
            made = self.known[unit, trained] = Unit(unit.name, function)
        at = tree.unflatten(tree.flatten(params)[1], [one for one, _ in held])
        params = {"at": at, "along": [along[0] for _, along in held if along]}
        with below_transforms(self.depth - 1):
            result, along = engine.call(made, params, (args, kwargs, [t for _, t in inputs.values()]), {})
            structure, found, others = parted(result)
            pairs = [(alone(x), None if t is None else alone(t)) for x, t in zip(found, along, strict=True)]
        return joined(structure, [x if t is None else make_dual(x, t) for x, t in pairs], others)


def traced_as(made: functools.partial[Any], fn: Any) -> Callable[..., Any]:
    """A function of a unit's own and of options, with what a compiler asks of a unit's."""
    if hasattr(fn, "kind"):
        vars(made).update(kind=lambda: (made.func, fn.kind(), *made.args[1:]), tables=fn.tables)
    return functools.update_wrapper(made, fn, ("__name__",), ())


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, at the level of the innermost transform."""
    make: Any = torch.autograd.forward_ad.make_dual
    dual: Tensor = make(primal, tangent)
    return dual
