"""Units of a loss function under one forward derivative, as units of parameters and tangents.

The loss function runs under ``torch.func.jvp``, and so does the code between its units. The call of a unit leaves that
transform: the engine runs an ordinary unit, of plain tensors, that takes inputs with their tangents, reads parameters
with theirs, and returns results with theirs. So the engine sees where each unit begins, forward and backward, and a
schedule can gather ahead and leave reductions in flight.
"""

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


class Frame:
    """A call of a unit beside its tensors, as one value in which the engine looks for none.

    Args:
        spec: the structure of its parameters and arguments.
        plain: the leaves of these that are no tensors, and None for each tensor.
        places: where tensors are among them: the parameters, then the others.
        trained: whether each parameter has a tangent.

    Attributes:
        out: the structure of its results.
        rest: results that are no floating-point tensors, and None for each that is one.
    """

    def __init__(self, spec: Any, plain: list[Any], places: list[int], trained: list[bool]) -> None:
        self.spec, self.plain, self.places, self.trained = spec, plain, places, trained
        self.out: Any = None
        self.rest: list[Any] = []

    @classmethod
    def of(cls, given: Any, trained: list[bool]) -> tuple["Frame", list[Tensor]]:
        """The frame of parameters and arguments, and the tensors among these."""
        leaves, spec = tree.flatten(given)
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        plain = [None if isinstance(x, Tensor) else x for x in leaves]
        return cls(spec, plain, places, trained), [leaves[i] for i in places]

    def call(self, fn: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The results that may have tangents, and the tensors among the others."""
        filled = list(self.plain)
        for i, tensor in zip(self.places, tensors, strict=True):
            filled[i] = tensor
        params, args, kwargs = tree.unflatten(self.spec, filled)
        outs, self.out = tree.flatten(fn(params, *args, **kwargs))
        moving = [isinstance(x, Tensor) and x.is_floating_point() for x in outs]
        self.rest = [None if moves else x for x, moves in zip(outs, moving, strict=True)]
        others = tuple([x for x in self.rest if isinstance(x, Tensor)])
        return tuple([x for x, moves in zip(outs, moving, strict=True) if moves]), others

    def result(self, found: Sequence[Any], others: Sequence[Tensor]) -> Any:
        """The unit's result."""
        given, plain = iter(found), iter(others)
        outs = [next(given) if x is None else next(plain) if isinstance(x, Tensor) else x for x in self.rest]
        return tree.unflatten(self.out, outs)


class DualFunction:
    """A unit's function of parameters, inputs and their tangents, which returns results and their tangents.

    Args:
        unit: the unit.
    """

    def __init__(self, unit: Unit) -> None:
        self.fn, self.__name__ = unit.fn, getattr(unit.fn, "__name__", "unit")

    def __call__(
        self, params: Any, frame: Frame, inputs: list[Tensor], tangents: list[Tensor | None]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """The results that are floating-point tensors, their tangents, and other tensors."""
        given = iter(params["along"])
        directions = [alone(next(given)) if trained else None for trained in frame.trained]
        tensors = [*map(alone, params["at"]), *inputs]
        moved = {i: t for i, t in enumerate([*directions, *tangents]) if t is not None}

        def of(*moving: Tensor) -> Any:
            filled = list(tensors)
            for i, x in zip(moved, moving, strict=True):
                filled[i] = x
            return frame.call(self.fn, filled)

        moving: Any = jvp(of, tuple([tensors[i] for i in moved]), tuple(moved.values()), has_aux=True)
        found, along, others = moving
        refuse_views(self.__name__, found, tensors[: len(frame.trained)])
        held = {storage_of(t) for t in directions if t is not None}
        return found, [t.clone() if storage_of(t) in held else t for t in along], others


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

    def __init__(self, pairs: Mapping[str, Pair], known: dict[Unit, Unit], recorded: bool = True) -> None:
        super().__init__(pairs)
        self.known, self.recorded = known, recorded

    def dual(self, pair: Pair) -> Tensor:
        """A leaf with its tangent."""
        with below_transforms(self.depth - 1):
            primal, tangents = alone(pair[0]), [alone(x) for x in pair[1]]
        return make_dual(primal, tangents[0]) if tangents else primal

    def run(self, engine: Any, unit: Unit, held: list[Pair], given: Any) -> Any:
        """The result of a unit."""
        frame, tensors = Frame.of(given, [bool(along) for _, along in held])
        inputs = [forward_parts(x, self.depth) for x in tensors[len(held) :]]
        if (made := self.known.get(unit)) is None:
            made = self.known[unit] = Unit(unit.name, DualFunction(unit))
        params = {"at": [one for one, _ in held], "along": [along[0] for _, along in held if along]}
        with below_transforms(self.depth - 1):
            called = frame, [x for x, _ in inputs], [t for _, t in inputs]
            found, along, others = engine.call(made, params, called, {})
            along = along if self.recorded else [t.detach() for t in along]
            pairs = [(alone(x), alone(t)) for x, t in zip(found, along, strict=True)]
        return frame.result([make_dual(*pair) for pair in pairs], others)


def make_dual(primal: Tensor, tangent: Tensor) -> Tensor:
    """A tensor with a tangent, at the level of the innermost transform."""
    make: Any = torch.autograd.forward_ad.make_dual
    dual: Tensor = make(primal, tangent)
    return dual
