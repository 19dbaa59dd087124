"""Precision: the dtypes in which a step computes and communicates, and the casts around calls of units.

Parameters and their state are never rounded.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import PlanError
from fshard.model.float8 import Places, prepared, scaled

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Gradients in float16 need ``fs.LossScale``, or small ones vanish silently."""

Products = Literal["float8_rowwise"]
"""The products of linear layers that are not those of the dtype of compute."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, as in FSDP2's ``MixedPrecisionPolicy``. Given to ``fs.make_plan(precision=)``.

    Parameters, optimizer state and gradient shards keep the dtype of the model, the master dtype. Only floating-point
    leaves are concerned.

    Args:
        compute: the dtype of the parameters that units read. Each rank casts its shard once an update, and gathers the
            result: with bfloat16 half the bytes. Units cast their own inputs. None: the master dtype.
        reduce: the dtype to which gradients are rounded before they are sent to be summed. Each rank adds the
            gradients that it receives to its shard in the master dtype, in the order of ranks; sums over replicas and
            microbatches are in the master dtype too. Replicas that exchange their shards, where that takes no more
            bytes than an all-reduce (in bfloat16: up to four replicas), round them once more. None: the master dtype.
        output: the dtype to which floating-point results of units are cast. None: not cast.
        inputs: whether floating-point arguments of units are cast to ``compute``.
        buffers: the dtype to which floating-point buffers are cast while a unit of a split module runs. Changed buffers
            return in their own dtype. None: not cast.
        products: ``"float8_rowwise"`` rounds the factors of linear layers (``F.linear``) inside of units to
            float8_e4m3, with a scale for each row: weights, inputs, and gradients of outputs. Gradients of weights are
            products in bfloat16. Only first derivatives can be taken. ``print(plan)`` says of which leaves it cannot be
            done. None: products in the dtype of compute.
        rounding: how updates of parameters kept in bfloat16 are rounded after an update in float32: ``"nearest"`` or
            ``"stochastic"``.

    ``output``, ``inputs`` and ``buffers`` apply to a unit if all of its leaves have this precision, or if the plan has
    it.

    Raises:
        PlanError: a dtype is not one of the four supported floating-point dtypes.

    >>> fs.Precision(torch.bfloat16, torch.bfloat16)
    Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    _: KW_ONLY
    inputs: bool = False
    buffers: torch.dtype | None = None
    products: Products | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}"
            for name in ("compute", "reduce", "output", "buffers")
            if (value := getattr(self, name)) is not None and value not in DTYPES
        ]
        if wrong:
            names = ", ".join(map(str, DTYPES))
            raise PlanError(f"fs.Precision({', '.join(wrong)}): give one of {names}, or None")
        if self.products not in (None, "float8_rowwise"):
            raise PlanError(f"fs.Precision(products={self.products!r}): give 'float8_rowwise' or None")
        if self.rounding not in ("nearest", "stochastic"):
            raise PlanError(f"fs.Precision(rounding={self.rounding!r}): give 'nearest' or 'stochastic'")
        if not isinstance(self.inputs, bool):
            raise PlanError(f"fs.Precision(inputs={self.inputs!r}): give True, to cast them to compute, or False")

    def __repr__(self) -> str:
        said = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"Precision({', '.join(said)})"

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which units read a leaf of this dtype."""
        return self.compute if self.compute is not None and dtype.is_floating_point else dtype

    def reduces_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a leaf of this dtype travel."""
        return self.reduce if self.reduce is not None and dtype.is_floating_point else dtype


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
