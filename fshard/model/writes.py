"""What a call writes to the structure of a module: attributes, containers in them, hooks.

``Model.apply`` is a pure function, so none of that outlives the call. A ``Surface`` knows what lay in the modules of an
instance before the call, and tells what the call wrote. An instance that was written to is not used again. What was
written inside of a unit is part of the unit's result (``Written``), so that whoever runs the unit sees the tensors in
it, and is written once more to the modules that stand for the unit outside of it. What those held before the call is
an argument of the unit (``Given``) where it is not what the module held when it was split.
"""

import enum
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor, nn

from fshard.errors import UnitError
from fshard.model.containers import holds, inside, mapped, matches, outline, take
from fshard.model.objects import held, opaque

CACHES = frozenset(("_flat_weights", "_flat_weight_refs"))
"""Attributes in which torch's recurrent modules hold their parameters once more. They follow from the parameters."""

BASE = frozenset((*vars(nn.Module()), "_apply", *CACHES)) - {"training", "_is_full_backward_hook"}
"""Attributes in which torch keeps its own account of a module, and what instances put in the place of a method."""

HOOKS = tuple(sorted(name for name in BASE if "hooks" in name and "state_dict" not in name))
"""Those of them that hold the hooks of its calls."""

BUFFERS = "_buffers"
"""Stands for the buffers that a call has added."""


OBJECTS = "{}"
"""Stands for objects in attributes, which are one and the same for all instances."""


More = tuple[int, str, Any]
"""An attribute that each instance has for itself: the number of its module, its name, and its outline."""


Glance = Callable[[], bool]
"""Tells whether modules hold what they held when it was made."""


class WrittenObject:
    """Tells that a call wrote to such an object. No graph can return one."""


class Given(NamedTuple):
    """What lies in a unit's modules when it is called, where that is not what lay there at ``split``."""

    writes: dict[str, Any]


class Written(NamedTuple):
    """The result of a unit whose call wrote to its modules: what it returned, and what it wrote."""

    value: Any
    writes: dict[str, Any]


class Gone(enum.Enum):
    """Stands for an attribute that was deleted."""

    GONE = 0


class Below(str):
    """Stands for a module of the unit: its path."""

    __slots__ = ()


class Leaf(str):
    """Stands for a parameter of the unit: its path."""

    __slots__ = ()


class Flag:
    """Whether a table of some instance of a template was written to, ever."""

    __slots__ = ("raised",)

    def __init__(self) -> None:
        self.raised = False


WRITES = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
"""The methods of dicts that write."""


def tables(flag: Flag) -> tuple[type[OrderedDict[Any, Any]], type[dict[Any, Any]]]:
    """Kinds of dicts that raise a flag when they are written to: for hooks, and for parts of modules."""

    def raising(write: Callable[..., Any]) -> Callable[..., Any]:
        def raised(self: Any, *args: Any, **kwargs: Any) -> Any:
            flag.raised = True
            return write(self, *args, **kwargs)

        return raised

    def watched(base: type[Any]) -> type[Any]:
        return type(base.__name__, (base,), {"__slots__": ()} | {name: raising(getattr(base, name)) for name in WRITES})

    return watched(OrderedDict), watched(dict)


@dataclass(frozen=True, slots=True)
class View:
    """What is watched of one module, and what lay there before the call.

    Attributes:
        path: the module's path.
        names: attributes that hold no containers.
        kept: what they hold.
        read: gets that from the module's dict.
        holding: attributes that hold containers, and the outlines of these.
        hooks: the keys of the hooks that there are, by the name of their table.
        buffers: the names of its buffers.
        known: all names that are no new ones.
    """

    path: str
    names: tuple[str, ...]
    kept: tuple[Any, ...]
    read: Callable[[dict[str, Any]], Sequence[Any]]
    holding: tuple[tuple[str, Any], ...]
    hooks: Mapping[str, tuple[Any, ...]]
    buffers: frozenset[str]
    known: frozenset[str]


def view(path: str, entries: Mapping[str, Any], without: Iterable[str] = ()) -> View:
    """The view of a module with this dict; names in ``without`` are not watched."""
    names = [name for name in entries if name not in BASE and name not in without]
    holding = {name: outline(entries[name]) for name in names if holds(entries[name])}
    flat = tuple(name for name in names if name not in holding)
    return View(
        path=path,
        names=flat,
        kept=tuple([entries[name] for name in flat]),
        read=_getter(flat),
        holding=tuple(holding.items()),
        hooks={name: tuple(entries[name]) for name in HOOKS if entries.get(name)},
        buffers=frozenset(entries["_buffers"]),
        known=frozenset((*BASE, *names, *without)),
    )


class Scene:
    """The views of modules, laid out for a quick comparison.

    Args:
        views: of each module.
        size: the lengths of their dicts and of their tables of buffers, added up.
    """

    def __init__(self, views: Sequence[View], size: int) -> None:
        self.views, self.size = views, size
        self.reads = [seen.read for seen in views]
        self.kept = [x for seen in views for x in seen.kept]
        self.holding = [(i, name, was) for i, seen in enumerate(views) for name, was in seen.holding]

    @functools.cached_property
    def comparison(self) -> CodeType:
        """The source of a ``Glance``, which compares attribute by attribute: a loop would take three times as long."""
        numbers = itertools.count()
        terms = [f"m{i}[{name!r}] is x{next(numbers)}" for i, seen in enumerate(self.views) for name in seen.names]
        sizes = "+".join(f"len(m{i})+len(b{i})" for i in range(len(self.views)))
        test = " and ".join(["not flag.raised", f"{sizes} == size", *terms, "(not holding or all(map(same, holding)))"])
        body = f"  try:\n    return {test}\n  except KeyError:\n    return False\n"
        return compile(f"def glance():\n{body}", "<attributes of modules>", "exec")

    def glance(self, modules: Sequence[nn.Module], flag: Flag, more: Sequence[More]) -> Glance:
        """A look at modules that have been seen to be left alone, quick enough for every call.

        Args:
            modules: the modules.
            flag: tells whether tables were written to. One that was ever raised needs a closer look.
            more: attributes that the instance has for itself.
        """
        space: dict[str, Any] = {"flag": flag, "size": self.size, "same": _same_container}
        space["holding"] = [(modules[i].__dict__, name, was) for i, name, was in (*self.holding, *more)]
        for i, module in enumerate(modules):
            space |= {f"m{i}": module.__dict__, f"b{i}": module._buffers}
        space |= {f"x{i}": value for i, value in enumerate(self.kept)}
        exec(self.comparison, space)
        made: Glance = space["glance"]
        return made


def _same_container(held: tuple[dict[str, Any], str, Any]) -> bool:
    entries, name, was = held
    return matches(entries[name], was)


class Surface:
    """What calls may write of the modules of an instance.

    Args:
        scene: what lay there before.
        modules: the modules.
        flag: tells whether tables were written to.
        more: attributes that each instance has for itself.
    """

    __slots__ = ("_begun", "_entries", "_flag", "_more", "modules", "scene")

    def __init__(self, scene: Scene, modules: Sequence[nn.Module], flag: Flag, more: Sequence[More] = ()) -> None:
        self.scene, self.modules, self._flag, self._more = scene, modules, flag, more
        self._entries = [module.__dict__ for module in modules]
        self._begun: list[tuple[str, Tensor, int]] = []

    def clean(self) -> bool:
        """Whether everything is as it was before the call."""
        scene, held = self.scene, self._entries
        try:
            found = chain.from_iterable([read(entries) for read, entries in zip(scene.reads, held, strict=True)])
            if not all(map(operator.is_, found, scene.kept)):
                return False
            if not all([matches(held[i][name], was) for i, name, was in (*scene.holding, *self._more)]):
                return False
        except KeyError:
            return False
        if sum(map(len, held)) + sum([len(entries["_buffers"]) for entries in held]) != scene.size:
            return False
        return not self._begun and not (self._flag.raised and self._hooked())

    def writes(self) -> dict[str, Any]:
        """What differs from before, by its name. Hooks of the first module are its own affair."""
        found: dict[str, Any] = {}
        for number, (seen, entries) in enumerate(zip(self.scene.views, self._entries, strict=True)):
            watched = chain(zip(seen.names, seen.kept, strict=True), seen.holding)
            for name, was in chain(watched, [(name, was) for i, name, was in self._more if i == number]):
                now = entries.get(name, Gone.GONE)
                if not matches(now, was):
                    found[_spot(seen.path, name)] = now
            for name in entries.keys() - seen.known:
                found[_spot(seen.path, name)] = entries[name]
            if len(entries["_buffers"]) > len(seen.buffers):
                new = {name: x for name, x in entries["_buffers"].items() if name not in seen.buffers}
                found[_spot(seen.path, BUFFERS)] = new
            for name in HOOKS if number and self._flag.raised else ():
                if tuple(entries[name]) != seen.hooks.get(name, ()):
                    found[_spot(seen.path, name)] = dict(entries[name])
        found |= {spot: self._at(spot) for spot, x, before in self._begun if version(x) != before}
        paths = self._paths() if found else {}
        return {spot: mapped(lambda x: paths.get(id(x), x), found[spot]) for spot in sorted(found)}

    def write(self, writes: Mapping[str, Any]) -> None:
        """Write to the modules what was written to others of their kind."""
        below = {seen.path: module for seen, module in zip(self.scene.views, self.modules, strict=True)}
        for spot, given in writes.items():
            if spot == OBJECTS:
                continue
            path, _, name = spot.rpartition(".")
            entries = below[path].__dict__
            value = mapped(lambda x: _meant(x, below), given)
            if value is Gone.GONE:
                entries.pop(name, None)
            elif name == BUFFERS:
                entries[name].update(value)
            elif name in HOOKS:
                for key in set(entries[name]) - set(value):
                    del entries[name][key]
                entries[name].update({key: hook for key, hook in value.items() if key not in entries[name]})
            else:
                entries[name] = take(entries.get(name), value)

    def begin(self, writes: Mapping[str, Any]) -> None:
        """Start a call from modules to which this was written before: from now on, that is what lay there."""
        self.write({spot: mapped(_own, value) for spot, value in writes.items()})
        touched = {spot.rpartition(".")[0] for spot in writes}
        views = [
            view(seen.path, entries, seen.known - set(entries) - BASE) if seen.path in touched else seen
            for seen, entries in zip(self.scene.views, self._entries, strict=True)
        ]
        self.scene = Scene(views, sum(len(entries) + len(entries["_buffers"]) for entries in self._entries))
        self._begun = [
            (spot, x, version(x)) for spot in writes for x in inside(self._at(spot)) if isinstance(x, Tensor)
        ]

    def _paths(self) -> dict[int, Below | Leaf]:
        """What stands for modules and parameters, which are others in another instance."""
        found: dict[int, Below | Leaf] = {}
        for seen, module in zip(self.scene.views, self.modules, strict=True):
            found[id(module)] = Below(seen.path)
            leaves = module._parameters.items()
            found |= {id(leaf): Leaf(_spot(seen.path, name)) for name, leaf in leaves if leaf is not None}
        return found

    def _hooked(self) -> bool:
        return any(
            tuple(entries[name]) != seen.hooks.get(name, ())
            for seen, entries in zip(self.scene.views, self._entries, strict=True)
            for name in HOOKS
        )

    def _at(self, spot: str) -> Any:
        path, _, name = spot.rpartition(".")
        number = next(i for i, seen in enumerate(self.scene.views) if seen.path == path)
        return self._entries[number].get(name)


def refuse(unit: str, writes: Mapping[str, Any], whole: bool = True) -> None:
    """Refuse what a unit wrote and cannot return.

    Args:
        unit: its name.
        writes: what it wrote.
        whole: whether that can be returned unless it holds tensors that nobody sees, or is used up by a look at it.

    Raises:
        UnitError: something cannot be returned.
    """
    for spot, value in writes.items():
        odd = [x for x in opaque(value) if held(x) or isinstance(x, Iterator)]
        if odd or not whole:
            what = f"a {type(odd[0]).__name__}" if odd else "a tensor, in an object that all calls share"
            raise unreturnable(unit, spot, what)
        if any(isinstance(x, nn.Module) for x in inside(value)):
            raise unreturnable(unit, spot, "a new module")


def unreturnable(unit: str, spot: str, what: str) -> UnitError:
    """Something that a unit's call writes, and that cannot be one of its results."""
    return UnitError(
        f"unit {unit} sets {spot} to {what}, which cannot be one of its results: a call may set attributes of modules "
        f"to tensors, plain values, and lists, tuples, dicts and dataclasses of them. Return it from the unit, or let "
        f"no unit contain the module that sets it"
    )


def written_in_place(spots: Iterable[str]) -> UnitError:
    """Tensors in attributes that a call wrote to."""
    return UnitError(
        f"the call wrote in place to {', '.join(spots)}, a tensor that was there at fs.split and that all calls share: "
        f"set the attribute to a new tensor (self.x = self.x + y, not self.x += y), or register it as a buffer"
    )


def version(x: Tensor) -> int:
    """How often a tensor was written to; 0 for a tensor of inference mode, which does not count."""
    return 0 if x.is_inference() else x._version


def _meant(x: Any, below: Mapping[str, nn.Module]) -> Any:
    """The module or the parameter that something stands for; else the thing itself."""
    if type(x) is Below:
        return below[x]
    if type(x) is Leaf:
        path, _, name = x.rpartition(".")
        return below[path]._parameters[name]
    return x


def _own(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _spot(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _getter(names: Sequence[str]) -> Callable[[dict[str, Any]], Sequence[Any]]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    return (lambda entries: (entries[names[0]],)) if names else (lambda entries: ())
