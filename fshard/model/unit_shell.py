"""Shells: the stand-ins of units in the code around them."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fshard.model.changed_buffers import Place
from fshard.model.leaves import LeafOrder
from fshard.model.model_refusals import changed_from_outside
from fshard.model.unit import Unit
from fshard.model.writes import Flag, Glance, More, PriorWrites, ResultAndWrites, Scene, Surface, TableView


class InstanceTensors:
    """The tensors of an instance.

    Attributes:
        leaves: the tensors that it holds as parameters.
        places: for every buffer, its places in the instance.
        unwritten: whether the last call wrote nothing.
        more: attributes that the instance does not share with others.
    """

    __slots__ = ("leaves", "more", "places", "unwritten")

    def __init__(self, leaves: Sequence[Any], places: Sequence[Sequence[Place]]) -> None:
        self.leaves, self.places = leaves, places
        self.unwritten = False
        self.more: list[More] = []

    def bind(self, number: int, buffer: Any) -> None:
        """Put a buffer into all of its places."""
        for entries, name in self.places[number]:
            entries[name] = buffer

    def bound(self, number: int) -> Any:
        """The buffer that the modules hold now."""
        entries, name = self.places[number][0]
        return entries[name]


@dataclass(frozen=True, eq=False)
class Shell:
    """The stand-in of a unit in the code around it. It hands the call to the unit.

    The unit's writes to its modules are repeated on the modules that stand for them in the outer instance.

    Attributes:
        params: the order of the unit's parameters, and their numbers among the leaves of the whole model.
        buffers: by their path in the unit, the numbers of its buffers.
        views: the views of the unit's modules.
    """

    unit: Unit
    params: tuple[LeafOrder, tuple[int, ...]]
    buffers: Mapping[str, int]
    views: Sequence[TableView]

    def forward(self, tensors: InstanceTensors, modules: "UnitModules") -> Callable[..., Any]:
        """The forward of the module in an instance."""
        unit, buffers = self.unit, self.buffers
        order, numbers = self.params
        call = unit.on(order.tree([tensors.leaves[i] for i in numbers]))

        def plain(*args: Any, **kwargs: Any) -> Any:
            if not (tensors.unwritten and modules.quiet()):
                args = (*modules.given(unit.name), *args)
            out = call(args, kwargs)
            return modules.written(out) if type(out) is ResultAndWrites else out

        def stateful(*args: Any, **kwargs: Any) -> Any:
            now = {path: tensors.bound(i) for path, i in buffers.items()}
            if not (tensors.unwritten and modules.quiet()):
                args = (*modules.given(unit.name), *args)
            out, changed = call((now, *args), kwargs)
            for path, buffer in changed.items():
                tensors.bind(buffers[path], buffer)
            return modules.written(out) if type(out) is ResultAndWrites else out

        return stateful if buffers else plain


class UnitModules:
    """The modules of an instance that stand for those of a unit.

    Args:
        tensors: the tensors of the instance.
        modules: the modules. The first gets a forward that refers to this object, so the reference to it is weak.
        scene: what the modules held at ``split``.
        flag: says whether tables were written to.
        numbers: the number of each module in the instance.
        moved: names a child or a parameter that these modules, by number, hold no longer, or hold anew.
    """

    __slots__ = ("_first", "_flag", "_glance", "_moved", "_numbers", "_rest", "_scene", "_tensors")

    def __init__(
        self,
        tensors: InstanceTensors,
        modules: Sequence[nn.Module],
        scene: Scene,
        flag: Flag,
        numbers: Sequence[int],
        moved: Callable[[Sequence[Any], Mapping[int, nn.Module]], str | None],
    ) -> None:
        self._tensors, self._scene, self._flag, self._numbers, self._moved = tensors, scene, flag, numbers, moved
        self._first, self._rest = weakref.ref(modules[0]), modules[1:]
        self._glance: Glance | None = None

    def quiet(self) -> bool:
        """Tell whether the modules are unwritten: a check quick enough for every call of a kept instance."""
        if self._glance is None:
            self._glance = self._scene.glance(self._modules(), self._flag, self._more())
        if self._glance():
            return True
        self._tensors.unwritten = False
        return False

    def given(self, unit: str) -> tuple[PriorWrites, ...]:
        """The unit's extra argument: the writes to the modules here; empty if there are none.

        Raises:
            UnitError: the modules hold other children or parameters than at ``split``.
        """
        modules = dict(zip(self._numbers, self._modules(), strict=True))
        if (moved := self._moved(self._tensors.leaves, modules)) is not None:
            raise changed_from_outside(unit, moved)
        surface = self._surface()
        writes = {} if surface.clean() else surface.writes()
        return (PriorWrites(writes),) if writes else ()

    def written(self, result: ResultAndWrites) -> Any:
        """Repeat the unit's writes, and return its result."""
        self._tensors.unwritten = False
        self._surface().write(result.writes)
        return result.value

    def _surface(self) -> Surface:
        return Surface(self._scene, self._modules(), self._flag, self._more())

    def _modules(self) -> Sequence[nn.Module]:
        first = self._first()
        assert first is not None  # its forward runs
        return (first, *self._rest)

    def _more(self) -> list[More]:
        """The instance's own attributes, by the number of their module here."""
        place = {number: i for i, number in enumerate(self._numbers)}
        return [(place[i], name, was) for i, name, was in self._tensors.more if i in place]
