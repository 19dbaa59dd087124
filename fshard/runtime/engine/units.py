"""The units that a program calls: their names, the leaves that each reads, and what to call."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard.errors import UnitError
from fshard.model.float8 import attach_rows, rows_of
from fshard.model.unit import Unit, slot_of
from fshard.runtime.engine.hosted_activations import HostedActivations
from fshard.runtime.engine.proxies import Proxy
from fshard.runtime.engine.remat_rules import Remat
from fshard.runtime.memory import Slots
from fshard.sharding.plan import Plan

MOST = 12
"""Leaves that an error lists."""

_PLAIN = frozenset((Tensor,))


class UnitReads:
    """The leaves that a unit reads: their paths in the order of its flat leaves, and by group.

    Attributes:
        sinks: of the groups that are trained, the numbers of these leaves in ascending order, and the leaves.
    """

    def __init__(self, paths: Sequence[str], plan: Plan, slots: Slots) -> None:
        places = plan.places()
        self.paths = tuple(paths)
        self.groups: dict[int, list[int]] = {}
        for path in dict.fromkeys(paths):  # a leaf that is given twice has one gradient
            group, number = places[path]
            self.groups.setdefault(group.id, []).append(number)
        trained = [(g, sorted(numbers)) for g, numbers in self.groups.items() if plan.groups[g].trainable]
        self.sinks = [(g, numbers, [slots.groups[g].leaves[n] for n in numbers]) for g, numbers in trained]

    def told(self, unit: str, plan: Plan) -> str:
        """Return what to say of an error inside of the unit.

        Its author sees sizes of parts there, and specs elsewhere.
        """
        leaves = [plan.leaves[path] for path in self.paths]
        rows = [
            f"  {leaf.path}  {list(leaf.shape)}: {list(leaf.compute_shape)}, by {leaf.compute}"
            for leaf in leaves
            if leaf.compute_shape != leaf.shape
        ]
        if not rows:
            return f"This was in unit {unit}."
        more = [f"  ... and {len(rows) - MOST} more"] if len(rows) > MOST else []
        head = f"This was in unit {unit}. Of these leaves each rank has a part there:"
        remedy = (
            "Code that needs all of a leaf needs a rule without that axis; other code needs the sizes of parts, "
            "such as fs.parallel.local_heads(heads)."
        )
        return "\n".join([head, *rows[:MOST], *more, remedy])

    def written(self, unit: str, watched: Sequence[Tensor], versions: Sequence[int]) -> UnitError:
        """The error of a unit that wrote in place to its inputs or leaves, which had these versions before."""
        count = len(watched) - len(self.paths)
        changed = [i for i, x in enumerate(watched) if x._version != versions[i]]
        what = [f"parameter {self.paths[i - count]}" if i >= count else f"input {i}" for i in changed]
        return UnitError(
            f"unit {unit} wrote in place to {', '.join(what)}: units are pure functions, so return new values "
            f"(x = x + y, not x += y), or clone what is to be changed"
        )

    def aliased(self, unit: str, number: int) -> UnitError:
        """The error of a unit one of whose outputs is a view of a leaf."""
        some = ", ".join(self.paths[:4]) + (", ..." if len(self.paths) > 4 else "")
        return UnitError(
            f"output {number} of unit {unit} is a view of one of its parameters ({some}), whose memory will hold "
            f"another unit's weights: return a copy (.clone()), or read the parameter where it is used"
        )


class Called(NamedTuple):
    """A unit as it is called.

    Attributes:
        name: its name in the schedule.
        params: its parameter tree, of slot leaves.
        leaves: the leaves of that.
        function: the unit as a function of its other arguments.
        reads: what it reads.
        stopped: whether no gradient flows into some of these leaves.
    """

    name: str
    params: Any
    leaves: list[Tensor]
    function: Callable[..., Any]
    reads: UnitReads
    stopped: bool


class Units:
    """The units that a program has called so far.

    Args:
        slots: the slots of its groups.
        remat: which units are computed again in their backward.
        engine: who runs them.

    Attributes:
        reads: what each reads, by name.
        activations: what moves their activations to the host and back; None if nothing does.
    """

    def __init__(self, plan: Plan, slots: Slots, remat: Remat, engine: Any) -> None:
        self.reads: dict[str, UnitReads] = {}
        self._plan, self._slots, self.remat, self._engine = plan, slots, remat, engine
        self.activations: HostedActivations | None = None
        self._names: dict[tuple[str, tuple[object, ...]], str] = {}
        self._trees: dict[Unit, tuple[Any, Called]] = {}

    def called(self, unit: Unit, params: Any) -> Called:
        """A unit that is called with this tree of slot leaves or proxies.

        Raises:
            UnitError: leaves are not those of the engine's parameter tree.
        """
        # The tree that a split module hands to its unit is made once, so its identity tells everything.
        held = self._trees.get(unit)
        if held is not None and held[0] is params:
            return held[1]
        given = params
        leaves, spec = tree.flatten(params)
        function = unit.name or getattr(unit.fn, "__name__", "unit")
        key = (function, tuple([getattr(leaf, "_fshard_slot", unit) for leaf in leaves]))
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = self._register(unit, leaves)
        stopped = [getattr(slot, "stopped", False) for slot in key[1]]
        if any([type(leaf) is Proxy for leaf in leaves]):
            leaves = [self._slots.by_path[path] for path in self.reads[name].paths]
            leaves = [_detached(leaf) if stop else leaf for leaf, stop in zip(leaves, stopped, strict=True)]
            params = tree.unflatten(spec, leaves)
        run = unit.prepare(params) if unit.prepare else functools.partial(unit.fn, params)
        called = Called(
            name, params, leaves, self.remat.around(name, run, self._engine), self.reads[name], any(stopped)
        )
        if unit.name:
            self._trees[unit] = (given, called)
        return called

    def _register(self, unit: Unit, leaves: list[Any]) -> str:
        slots = [slot_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        paths = tuple(slot.path for slot in slots if slot is not None and slot.engine is self._engine)
        if len(paths) != len(leaves):
            raise UnitError(
                f"{unit!r} was called with {len(leaves)} parameter leaves, of which {len(leaves) - len(paths)} are not "
                f"leaves of this step's params: pass subtrees of params as they are, and everything else as arguments"
            )
        function = getattr(unit.fn, "__name__", "unit")
        name = unit.name or f"{function}({_prefix(paths)})"
        if name in self.reads and self.reads[name].paths != paths:
            name = f"{function}({','.join(paths)})"
        self.reads.setdefault(name, UnitReads(paths, self._plan, self._slots))
        return name


def _detached(leaf: Tensor) -> Tensor:
    attach_rows(alone := leaf.detach(), rows_of(leaf))
    return alone


GRAD, VERSION = operator.attrgetter("grad"), operator.attrgetter("_version")
"""Read an attribute of each tensor by ``map``, without a loop in Python."""

_NONE = frozenset((None,))


def bare(leaves: Sequence[Tensor]) -> bool:
    """Tell whether no leaf has a gradient. All leaves are asked several times a step."""
    return _NONE.issuperset(map(GRAD, leaves))


def _prefix(paths: Sequence[str]) -> str:
    """The longest path that all of these start with; all of them, if there is none."""
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or ",".join(paths)


def tensors_in(values: Any) -> Sequence[Tensor]:
    """The tensors in any pytree. Flattening costs more than all else here, and is seldom needed."""
    if type(values) is Tensor:
        return (values,)
    if type(values) is tuple and _PLAIN.issuperset(map(type, values)):
        return values
    return [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
