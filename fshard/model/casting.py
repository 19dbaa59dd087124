"""Casts around units' calls: precision applied to their inputs, results and buffers."""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fshard import tree
from fshard.model.float8 import Places, prepared, scaled
from fshard.model.precision import Precision


class Casting:
    """Makes the casts of one engine's units. A unit inside of a unit is part of the outer one."""

    def __init__(self, default: Precision, leaves: Mapping[str, Precision], float8: Collection[str] = ()) -> None:
        self.default, self.leaves, self.float8 = default, leaves, float8
        self._scaled: WeakKeyDictionary[Any, tuple[Any, dict[Places, Any]]] = WeakKeyDictionary()
        self._known: dict[tuple[int, str], Precision] = {}
        self._inside = False

    def call(self, unit: Any, slot: Any, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit: cast its inputs, then its results."""
        if self._inside:
            return slot.engine.call(unit, params, args, kwargs)
        if self.float8:
            unit = self._multiplying(unit, params)
        how = self._of(unit, slot.path, params)
        buffers = args[:1] if unit.buffers else ()
        rest, kwargs = _cast((args[len(buffers) :], kwargs), how.compute if how.inputs else None)
        self._inside = True
        try:
            result = slot.engine.call(unit, params, (*_cast(buffers, how.buffers), *rest), kwargs)
        finally:
            self._inside = False
        if not unit.buffers:
            return _cast(result, how.output)
        out, changed = result
        return _cast(out, how.output), {path: _cast(new, buffers[0][path].dtype) for path, new in changed.items()}

    def _multiplying(self, unit: Any, params: Any) -> Any:
        """The unit, with its products in float8: the same object for calls with equal paths."""
        given, made = self._scaled.setdefault(unit, (None, {}))
        if given is not None and given is params:
            return made[()]
        slots = [getattr(leaf, "_fshard_slot", None) for leaf in tree.leaves(params)]
        places = tuple((n, x.path) for n, x in enumerate(slots) if x is not None and x.path in self.float8)
        if not places:
            return unit
        if places not in made:
            prepare = unit.prepare and functools.partial(prepared, unit.prepare, places)
            made[places] = replace(unit, fn=scaled(unit.fn, places), prepare=prepare)
        if unit.name:  # the tree that a split module hands to its unit is made once
            made[()] = made[places]
            self._scaled[unit] = params, made
        return made[places]

    def _of(self, unit: Any, first: str, params: Any) -> Precision:
        """The precision of a unit: the common one of its leaves, or the plan's."""
        key = id(unit), first
        if key not in self._known:
            slots = (getattr(leaf, "_fshard_slot", None) for leaf in tree.leaves(params))
            found = {self.leaves[slot.path] for slot in slots if slot is not None}
            self._known[key] = found.pop() if len(found) == 1 else self.default
        return self._known[key]


def make_casting(default: Precision, leaves: Mapping[str, Precision], float8: Collection[str] = ()) -> Casting | None:
    """The casts of an engine's units, and the paths of weights that they multiply in float8; None if there are none."""
    casts = any(p.inputs or p.output is not None or p.buffers is not None for p in {default, *leaves.values()})
    return Casting(default, leaves, float8) if casts or float8 else None


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors of any pytree. Parameters keep their dtype: the engine casts them."""
    if dtype is None:
        return values

    def one(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point() and not hasattr(x, "_fshard_slot")
        return x.to(dtype) if floating else x

    return tree.mapped(one, values)


def note_outside(error: Exception, batch: Any, params: Any) -> None:
    """Add a note to torch's error about dtypes or devices outside of units: what met there, and what to do."""
    text = str(error)
    if re.search(r"\bmeta\b", text) and "device" in text:
        error.add_note(
            "A tensor without data was computed with, such as one of a module that was made under fs.empty_weights(): "
            "compute from params alone, with model.apply(params, ...)."
        )
    given, read = (
        sorted({str(x.dtype)[6:] for x in tree.leaves(held) if isinstance(x, Tensor)}) for held in (batch, params)
    )
    if given != read and re.search("dtype|scalar type", text) and not hasattr(error, "__notes__"):
        error.add_note(
            f"The batch has {', '.join(given)}, and parameters are computed with in {', '.join(read)}: cast the "
            f"batch, or make the layers that read it units, whose inputs fs.Precision(inputs=True) casts."
        )


def note_dtypes(error: Exception, unit: str, inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Add a note to torch's error about dtypes: which ones met in a unit, and how to cast them."""
    given, read = ({str(x.dtype)[6:] for x in held if x.is_floating_point()} for held in (inputs, leaves))
    if read and given - read and re.search("dtype|scalar type", str(error)):
        error.add_note(
            f"Unit {unit} was called with {', '.join(sorted(given))} and reads parameters in "
            f"{', '.join(sorted(read))}: cast the input, or let fs.Precision(compute=..., inputs=True) of the plan "
            "do it for all units."
        )
