"""A call's writes to the structure of a module: attributes, containers in them, hooks.

``Model.apply`` is a pure function, so no write outlives the call. A ``Surface`` records what the modules of an instance
held before the call, and finds the call's writes. An instance that was written to is not used again. Writes inside of a
unit are part of the unit's result (``ResultAndWrites``), so that the engine sees the tensors in them, and are repeated
on the modules that stand for the unit outside of it. If those modules were written to before the call, these writes are
an argument of the unit (``PriorWrites``).
"""

import enum
import functools
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
from fshard.model.foreign_objects import held, opaque

CACHES = frozenset(("_flat_weights", "_flat_weight_refs"))
"""Attributes in which torch's recurrent modules hold their parameters a second time."""

BASE = frozenset((*vars(nn.Module()), "_apply", *CACHES)) - {"training", "_is_full_backward_hook"}
"""Attributes that torch keeps for itself, and the method that instances replace."""

HOOKS = tuple(sorted(name for name in BASE if "hooks" in name and "state_dict" not in name))
"""The attributes that hold the hooks of calls."""

BUFFERS = "_buffers"
"""The name under which the buffers that a call added are written."""


OBJECTS = "{}"
"""Stands for objects in attributes, which all instances share."""


More = tuple[int, str, Any]
"""An attribute that instances do not share: the number of its module, its name, and its outline."""


Glance = Callable[[], bool]
"""Returns whether modules are as they were when it was made."""


class WrittenObject:
    """Says that a call wrote to such an object. No graph can return one."""


class PriorWrites(NamedTuple):
    """The writes to a unit's modules before its call."""

    writes: dict[str, Any]


class ResultAndWrites(NamedTuple):
    """The result of a unit whose call wrote to its modules: the value that it returned, and the writes."""

    value: Any
    writes: dict[str, Any]


class Gone(enum.Enum):
    """Stands for an attribute that was deleted."""

    GONE = 0


class ModulePath(str):
    """Stands for a module of the unit."""

    __slots__ = ()


class LeafPath(str):
    """Stands for a parameter of the unit."""

    __slots__ = ()


class Flag:
    """Marks of a table of any instance that was written to (raised), and of children of stand-ins (opened)."""

    __slots__ = ("opened", "raised")

    def __init__(self) -> None:
        self.raised = self.opened = False


WRITES = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
"""The methods of dicts that write."""

READS = "__eq__ __ne__ __getitem__ __iter__ __or__ __ror__ __repr__ copy get items values".split()
"""The methods of dicts that show values. ``dict(x)`` and ``{**x}`` copy a dict past its methods unless it has its own
``__iter__``."""


def tables(flag: Flag) -> tuple[type[OrderedDict[Any, Any]], type[dict[Any, Any]], type[dict[Any, Any]]]:
    """Classes of dicts that raise a flag when they are written to: for hooks, for parts of modules, and for the
    children of a unit's stand-in, where reads are told too."""

    def telling(what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def told(self: Any, *args: Any, **kwargs: Any) -> Any:
            setattr(flag, what, True)
            return method(self, *args, **kwargs)

        return told

    def watched(base: type[Any], reads: Sequence[str] = ()) -> type[Any]:
        told = {name: telling("raised", getattr(base, name)) for name in WRITES}
        told |= {name: telling("opened", getattr(base, name)) for name in reads}
        return type(base.__name__, (base,), {"__slots__": (), **told})

    return watched(OrderedDict), watched(dict), watched(dict, READS)


@dataclass(frozen=True, slots=True)
class TableView:
    """The attributes of one module before the call.

    Attributes:
        path: the module's path.
        names: attributes that hold no containers.
        kept: the values of these.
        read: reads these values from the module's dict.
        holding: attributes that hold containers, with the outlines of the containers.
        hooks: by the name of their table, the keys of hooks.
        buffers: the names of its buffers.
        known: the names of all attributes; others are new.
    """

    path: str
    names: tuple[str, ...]
    kept: tuple[Any, ...]
    read: Callable[[dict[str, Any]], Sequence[Any]]
    holding: tuple[tuple[str, Any], ...]
    hooks: Mapping[str, tuple[Any, ...]]
    buffers: frozenset[str]
    known: frozenset[str]


def view(path: str, entries: Mapping[str, Any], without: Iterable[str] = ()) -> TableView:
    """The view of a module with this dict, without some names."""
    names = [name for name in entries if name not in BASE and name not in without]
    holding = {name: outline(entries[name]) for name in names if holds(entries[name])}
    flat = tuple(name for name in names if name not in holding)
    return TableView(
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
        sizes: of each module, the sum of the lengths of its dict and its table of buffers.
        hidden: the numbers of modules that nothing leads to but the children of a unit's stand-in.
    """

    def __init__(self, views: Sequence[TableView], sizes: Sequence[int], hidden: Iterable[int] = ()) -> None:
        self.views, self.sizes, self.size, self.hidden = views, sizes, sum(sizes), frozenset(hidden)
        self.reads = [seen.read for seen in views]
        self.kept = [x for seen in views for x in seen.kept]
        self.holding = [(i, name, was) for i, seen in enumerate(views) for name, was in seen.holding]

    @functools.cached_property
    def comparison(self) -> CodeType:
        """The code of a ``Glance``: attribute by attribute, in a third of a loop's time; hidden ones when read."""
        hidden = f"(not flag.opened or {self._comparison(self.hidden)})" if self.hidden else "True"
        shown = self._comparison([i for i in range(len(self.views)) if i not in self.hidden])
        test = f"not flag.raised and {shown} and {hidden} and (not holding or all(map(same, holding)))"
        body = f"  try:\n    return {test}\n  except KeyError:\n    return False\n"
        return compile(f"def glance():\n{body}", "<attributes of modules>", "exec")

    def _comparison(self, numbers: Iterable[int]) -> str:
        """An expression that compares the attributes of some modules."""
        sizes = "+".join([f"len(m{i})+len(b{i})" for i in numbers])
        terms = [f"{sizes} == {sum([self.sizes[i] for i in numbers])}"]
        for i in numbers:
            for k, (name, value) in enumerate(zip(self.views[i].names, self.views[i].kept, strict=True)):
                literal = value is None or value is True or value is False
                terms.append(f"m{i}[{name!r}] is {value if literal else f'x{i}_{k}'}")
        return " and ".join(terms)

    def glance(self, modules: Sequence[nn.Module], flag: Flag, more: Sequence[More]) -> Glance:
        """A check of unwritten modules that is quick enough for every call.

        Args:
            flag: says whether tables were written to. Once it is raised, the check fails.
            more: attributes that the instance does not share.
        """
        space: dict[str, Any] = {"flag": flag, "same": _same_container}
        space["holding"] = [(modules[i].__dict__, name, was) for i, name, was in (*self.holding, *more)]
        for i, module in enumerate(modules):
            space |= {f"m{i}": module.__dict__, f"b{i}": module._buffers}
        space |= {f"x{i}_{k}": value for i, seen in enumerate(self.views) for k, value in enumerate(seen.kept)}
        exec(self.comparison, space)
        made: Glance = space["glance"]
        return made


def _same_container(held: tuple[dict[str, Any], str, Any]) -> bool:
    entries, name, was = held
    return matches(entries[name], was)


class Surface:
    """The modules of an instance, as far as calls may write to them.

    Args:
        scene: the state before the call.
        flag: says whether tables were written to.
        more: attributes that the instance does not share.
    """

    __slots__ = ("_begun", "_entries", "_flag", "_more", "modules", "scene")

    def __init__(self, scene: Scene, modules: Sequence[nn.Module], flag: Flag, more: Sequence[More] = ()) -> None:
        self.scene, self.modules, self._flag, self._more = scene, modules, flag, more
        self._entries = [module.__dict__ for module in modules]
        self._begun: list[tuple[str, Tensor, int]] = []

    def clean(self) -> bool:
        """Tell whether a call wrote nothing."""
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
        """The call's writes, by name. Hooks of the first module run inside of the unit, and are left out."""
        found: dict[str, Any] = {}
        for number, (seen, entries) in enumerate(zip(self.scene.views, self._entries, strict=True)):
            own = [(name, was) for i, name, was in self._more if i == number]
            changed = dict(_changed(seen, entries, own))
            for name in HOOKS if number and self._flag.raised else ():
                if tuple(entries[name]) != seen.hooks.get(name, ()):
                    changed[name] = dict(entries[name])
            found |= {_spot(seen.path, name): value for name, value in changed.items()}
        found |= {spot: self._at(spot) for spot, x, before in self._begun if version(x) != before}
        paths = self._paths() if found else {}
        return {spot: mapped(lambda x: paths.get(id(x), x), found[spot]) for spot in sorted(found)}

    def write(self, writes: Mapping[str, Any]) -> None:
        """Repeat writes to the modules of another instance on these."""
        below = {seen.path: module for seen, module in zip(self.scene.views, self.modules, strict=True)}
        for spot, given in writes.items():
            if spot == OBJECTS:
                continue
            path, _, name = spot.rpartition(".")
            entries = below[path].__dict__
            value = mapped(lambda x: _resolved(x, below), given)
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
        """Repeat earlier writes before a call; they do not count as writes of the call."""
        self.write({spot: mapped(_own, value) for spot, value in writes.items()})
        touched = {spot.rpartition(".")[0] for spot in writes}
        views = [
            view(seen.path, entries, seen.known - set(entries) - BASE) if seen.path in touched else seen
            for seen, entries in zip(self.scene.views, self._entries, strict=True)
        ]
        self.scene = Scene(views, [len(entries) + len(entries["_buffers"]) for entries in self._entries])
        self._begun = [
            (spot, x, version(x)) for spot in writes for x in inside(self._at(spot)) if isinstance(x, Tensor)
        ]

    def _paths(self) -> dict[int, ModulePath | LeafPath]:
        """By identity, the paths that stand for modules and parameters, which differ between instances."""
        found: dict[int, ModulePath | LeafPath] = {}
        for seen, module in zip(self.scene.views, self.modules, strict=True):
            found[id(module)] = ModulePath(seen.path)
            leaves = module._parameters.items()
            found |= {id(leaf): LeafPath(_spot(seen.path, name)) for name, leaf in leaves if leaf is not None}
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


def _changed(seen: TableView, entries: dict[str, Any], own: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that differ from its view, and the buffers that are new."""
    for name, was in chain(zip(seen.names, seen.kept, strict=True), seen.holding, own):
        now = entries.get(name, Gone.GONE)
        if not matches(now, was):
            yield name, now
    for name in entries.keys() - seen.known:
        yield name, entries[name]
    if len(entries["_buffers"]) > len(seen.buffers):
        yield BUFFERS, {name: x for name, x in entries["_buffers"].items() if name not in seen.buffers}


def refuse(unit: str, writes: Mapping[str, Any], whole: bool = True) -> None:
    """Refuse writes of a unit that cannot be part of its result.

    Args:
        unit: its name.
        whole: whether a write can be returned unless it is an iterator or an object that holds tensors.

    Raises:
        UnitError: a write cannot be returned.
    """
    for spot, value in writes.items():
        odd = [x for x in opaque(value) if held(x) or isinstance(x, Iterator)]
        if odd or not whole:
            what = f"a {type(odd[0]).__name__}" if odd else "a tensor, in an object that all calls share"
            raise unreturnable(unit, spot, what)
        if any(isinstance(x, nn.Module) for x in inside(value)):
            raise unreturnable(unit, spot, "a new module")


def unreturnable(unit: str, spot: str, what: str) -> UnitError:
    """A unit's call writes a value that cannot be one of its results."""
    return UnitError(
        f"unit {unit} sets {spot} to {what}, which cannot be one of its results: a call may set attributes of modules "
        f"to tensors, plain values, and lists, tuples, dicts and dataclasses of them. Return it from the unit, or let "
        f"no unit contain the module that sets it"
    )


def written_in_place(spots: Iterable[str]) -> UnitError:
    """A call wrote in place to tensors in attributes."""
    return UnitError(
        f"the call wrote in place to {', '.join(spots)}, a tensor that was there at fs.split and that all calls share: "
        f"set the attribute to a new tensor (self.x = self.x + y, not self.x += y), or register it as a buffer"
    )


def version(x: Tensor) -> int:
    """The version of a tensor; 0 for a tensor of inference mode, which has none."""
    return 0 if x.is_inference() else x._version


def _resolved(x: Any, below: Mapping[str, nn.Module]) -> Any:
    """The module or the parameter that a path stands for; any other value itself."""
    if type(x) is ModulePath:
        return below[x]
    if type(x) is LeafPath:
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
