"""Following values through a run on fake tensors: from which outputs of units, and which leaves, each was computed."""

import inspect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard.model.unit import Unit, slot_of
from fshard.pipeline.staged_refusals import changes_values
from fshard.runtime.engine.activations import written_by
from fshard.runtime.engine.engine import Engine
from fshard.runtime.memory.slots import storage_of
from fshard.torch_internals import TorchDispatchMode

Source = tuple[int, int] | str
"""An output of a call of a unit, as the numbers of both, or the path of a leaf."""

INNER = -1
"""The number of the output where a value comes from inside of a call and is no result of it."""

Sources = frozenset[Source]
NONE: Sources = frozenset()


class TracedCall(NamedTuple):
    """A call of a unit: what it was given came from these sources, and what it returned."""

    needs: Sources
    spec: Any
    leaves: Sequence[Any]


class SourceEngine(Engine):
    """Runs a program on fake tensors, and writes down where the inputs of units come from."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.records: list[TracedCall] = []
        self.watch = SourceWatch(self)

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit, and note sources of its inputs and of its outputs."""
        if self.inside or self.executor is None or self.differentiating:
            return super().call(unit, params, args, kwargs)
        needs, before = self.watch.of((args, kwargs)), _plain_values(unit, args, kwargs)
        self.watch.beside.clear()
        result = super().call(unit, params, args, kwargs)
        needs |= self.watch.beside
        if _plain_values(unit, args, kwargs) != before:
            raise changes_values(self.units.called(unit, params).name)
        leaves, spec = tree.flatten(result)
        # From here on a result is another value than the same one inside of the call, which a hook may have kept, and
        # than an argument that is handed on: other stages get it from this call.
        leaves = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self.watch.begin(leaf, frozenset({(len(self.records), number)}))
                self.watch.outputs.setdefault(storage_of(leaf), []).append((len(self.records), number))
        self.records.append(TracedCall(needs, spec, leaves))
        return tree.unflatten(spec, leaves)


class SourceWatch(TorchDispatchMode):
    """Follows values through code between units.

    Attributes:
        beside: what the call under way has read so far, beside its arguments: a closure or a global may hold it.
        outputs: the outputs of units in each storage, as the numbers of call and output.
        written: the outputs that share a storage when code between units writes to it.
    """

    def __init__(self, engine: SourceEngine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.engine = engine
        self.sources: dict[int, Sources] = {}  # by tensor
        self.by_storage: dict[int | None, dict[int, Tensor]] = {}  # all tensors in it, which live as long as this
        self.inner: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # made inside of calls, with the numbers of these
        self.beside: set[Source] = set()
        self.outputs: dict[int | None, list[tuple[int, int]]] = {}
        self.written: set[tuple[tuple[int, int], ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op; its results come from what its arguments come from."""
        result = func(*args, **(kwargs or {}))
        if self.engine.inside and not self.engine.differentiating:
            self._read((args, kwargs))
            for leaf in tree.leaves(result):
                if isinstance(leaf, Tensor) and not self.knows(leaf):
                    self.inner[id(leaf)] = weakref.ref(leaf), len(self.engine.records)
        if not self.engine.inside and not self.engine.differentiating:
            found = self.of((args, kwargs))
            for leaf in tree.leaves(result) if found else ():
                if isinstance(leaf, Tensor):
                    self.begin(leaf, found)
            for leaf in written_by(func, args, kwargs or {}):
                self._write(leaf, found)
        return result

    def _read(self, values: Any) -> None:
        """Note what a call reads that was not made in it, and is no leaf."""
        for leaf in tree.leaves(values):
            if isinstance(leaf, Tensor) and slot_of(leaf) is None:
                found = self._sources(leaf)
                self.beside |= {x for x in found if x[0] != len(self.engine.records) and not isinstance(x, str)}

    def _write(self, leaf: Tensor, found: Sources) -> None:
        """Note an op that writes to memory: all that lies there comes from its arguments, too."""
        place = storage_of(leaf)
        self.written.add(tuple(self.outputs.get(place, ())))
        for other in [leaf, *self.by_storage.get(place, {}).values()]:
            self.begin(other, self._sources(other) | found)

    def of(self, values: Any) -> Sources:
        """The sources of all tensors in some values."""
        found = NONE
        for leaf in tree.leaves(values):
            if isinstance(leaf, Tensor):
                slot = slot_of(leaf)
                found |= self._sources(leaf) if slot is None else {slot.path}
        return found

    def _sources(self, value: Tensor) -> Sources:
        """Return the sources of a tensor. A tensor without a note has those of all tensors in its storage."""
        if self.knows(value):
            return self.sources[id(value)]
        made, call = self.inner.get(id(value), (_nothing, INNER))
        if made() is value:
            return frozenset({(call, INNER)})
        stored = self.by_storage.get(storage_of(value), {})
        return NONE.union(*[self.sources[other] for other in stored])

    def knows(self, value: Any) -> bool:
        """Tell whether the sources of a value itself are noted."""
        return isinstance(value, Tensor) and self.by_storage.get(storage_of(value), {}).get(id(value)) is value

    def begin(self, value: Tensor, sources: Sources) -> None:
        """Note the sources of a tensor."""
        self.sources[id(value)] = sources
        self.by_storage.setdefault(storage_of(value), {})[id(value)] = value

    def leaves_of(self, engine: Engine) -> None:
        """Note the leaves themselves, whose views have no slot."""
        for path, leaf in engine.slots.by_path.items():
            self.begin(leaf, frozenset({path}))


def _plain_values(unit: Unit, args: Any, kwargs: Any) -> list[Any]:
    """The plain values that a call is given, and those in its closure: on other stages it does not change them."""
    names = inspect.getclosurevars(unit.fn).nonlocals if inspect.isfunction(unit.fn) else {}
    held = [x for x in names.values() if type(x) in (int, float, str, bool, list, dict)]
    return [x for x in tree.leaves((args, kwargs, held)) if isinstance(x, int | float | str)]


def _nothing() -> None:
    """A weak reference to what is not there."""
