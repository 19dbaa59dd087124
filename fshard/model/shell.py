"""Shells: what stands for a unit in the code around it."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from fshard.model.buffers import Place
from fshard.model.leaves import LeafOrder
from fshard.model.unit import Unit
from fshard.model.writes import Flag, Given, Glance, More, Scene, Surface, View, Written


class Held:
    """What an instance holds, as far as code in it needs to know.

    Attributes:
        leaves: the tensors that it holds as parameters.
        places: for every buffer, the places that it fills.
        calm: whether a call has been seen to write nothing.
        more: attributes that the instance has for itself.
    """

    __slots__ = ("calm", "leaves", "more", "places")

    def __init__(self, leaves: Sequence[Any], places: Sequence[Sequence[Place]]) -> None:
        self.leaves, self.places = leaves, places
        self.calm = False
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
    """What stands for a unit in the code around it: it hands the call over.

    What a call of the unit wrote to its modules is written to those that stand for them out here.

    Attributes:
        unit: who gets the call.
        params: the order of the unit's parameters, and their numbers among the leaves of the whole.
        buffers: by their path in the unit, the numbers of its buffers.
        views: what is watched of the unit's modules.
    """

    unit: Unit
    params: tuple[LeafOrder, tuple[int, ...]]
    buffers: Mapping[str, int]
    views: Sequence[View]

    def forward(self, held: Held, below: "Below") -> Callable[..., Any]:
        """The forward of the module in an instance."""
        unit, buffers = self.unit, self.buffers
        order, numbers = self.params
        call = unit.on(order.tree([held.leaves[i] for i in numbers]))

        def plain(*args: Any, **kwargs: Any) -> Any:
            if not (held.calm and below.quiet()):
                args = (*below.given(), *args)
            out = call(args, kwargs)
            return below.written(out) if type(out) is Written else out

        def stateful(*args: Any, **kwargs: Any) -> Any:
            now = {path: held.bound(i) for path, i in buffers.items()}
            if not (held.calm and below.quiet()):
                args = (*below.given(), *args)
            out, changed = call((now, *args), kwargs)
            for path, buffer in changed.items():
                held.bind(buffers[path], buffer)
            return below.written(out) if type(out) is Written else out

        return stateful if buffers else plain


class Below:
    """The modules of an instance that stand for those of a unit.

    Args:
        held: what the instance holds.
        modules: the modules. The first gets a forward that refers to this, so it is referred to weakly.
        scene: what lies in them at ``split``.
        flag: tells whether tables were written to.
        numbers: the number of each module in the instance.
    """

    __slots__ = ("_first", "_flag", "_glance", "_held", "_numbers", "_rest", "_scene")

    def __init__(
        self, held: Held, modules: Sequence[nn.Module], scene: Scene, flag: Flag, numbers: Sequence[int]
    ) -> None:
        self._held, self._scene, self._flag, self._numbers = held, scene, flag, numbers
        self._first, self._rest = weakref.ref(modules[0]), modules[1:]
        self._glance: Glance | None = None

    def quiet(self) -> bool:
        """Whether nothing was written to the modules, by a look that is quick enough for every call.

        It refers to the first module, so it is for instances that are kept.
        """
        if self._glance is None:
            self._glance = self._scene.glance(self._modules(), self._flag, self._more())
        if self._glance():
            return True
        self._held.calm = False
        return False

    def given(self) -> tuple[Given, ...]:
        """What the unit must know of what was written here; nothing if nothing was."""
        surface = self._surface()
        writes = {} if surface.clean() else surface.writes()
        return (Given(writes),) if writes else ()

    def written(self, result: Written) -> Any:
        """Write what the unit wrote, and give what it returned."""
        self._held.calm = False
        self._surface().write(result.writes)
        return result.value

    def _surface(self) -> Surface:
        return Surface(self._scene, self._modules(), self._flag, self._more())

    def _modules(self) -> Sequence[nn.Module]:
        first = self._first()
        assert first is not None  # its forward runs
        return (first, *self._rest)

    def _more(self) -> list[More]:
        """The attributes that the instance has for itself, by the place of their modules here."""
        place = {number: i for i, number in enumerate(self._numbers)}
        return [(place[i], name, was) for i, name, was in self._held.more if i in place]
