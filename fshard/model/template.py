"""Templates: a module's structure, compiled once, so that a copy costs microseconds a module.

The copies are instances. They hold given tensors in the place of the module's parameters, and have attributes of their
own, with copies of containers and tables of hooks.
"""

import copy
import inspect
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fshard.errors import UnitError
from fshard.model.around_calls import AroundCall, converted, surrounded
from fshard.model.changed_buffers import Place
from fshard.model.containers import copied, holds, inside, outline
from fshard.model.elsewhere import Elsewhere
from fshard.model.foreign_objects import Shared
from fshard.model.unit_shell import InstanceTensors, Shell, UnitModules
from fshard.model.writes import BASE, CACHES, HOOKS, Flag, Glance, More, Scene, Surface, TableView, tables, view

Numbers = Mapping[tuple[int, str], int]
"""By place, the identity of the template's dict and a name in it, the number of its leaf."""

_TABLES = ("_parameters", "_buffers", "_modules")


class Instance:
    """One copy of a structure.

    Attributes:
        modules: its modules; the first one is called.
        surface: finds the writes of a call.
        glance: a quick check for writes, made once a call has written nothing.
        kept: whether further calls may use it.
        busy: whether a call is running.
    """

    __slots__ = ("busy", "glance", "kept", "modules", "surface", "tensors")

    def __init__(self, tensors: InstanceTensors, modules: Sequence[nn.Module], surface: Surface) -> None:
        self.tensors, self.modules, self.surface = tensors, modules, surface
        self.glance: Glance | None = None
        self.kept = self.busy = False


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """One module of a template. Modules, parameters and buffers are numbers; -1 stands for None."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    children: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    referring: tuple[str, ...]  # attributes that refer to modules or parameters of the structure
    holding: tuple[str, ...]  # other attributes that hold containers
    shell: Shell | None
    signature: Any
    around: AroundCall | None

    @property
    def replaced(self) -> tuple[str, ...]:
        """The attributes that instances have and the module has not."""
        return ("forward",) if self.shell is not None or self.around is not None else ()


class Template:
    """A structure, compiled.

    Args:
        root: the module.
        whole: the module that ``root`` is a part of.
        params: numbers of the parameters.
        buffers: numbers of the buffers.
        shells: by identity, the modules that are units.
        around: by identity, the code around the calls of modules.
    """

    def __init__(
        self,
        root: nn.Module,
        whole: nn.Module,
        params: Numbers,
        buffers: Numbers,
        shells: Mapping[int, Shell],
        around: Mapping[int, AroundCall],
    ) -> None:
        self.root = root
        self._originals = list(root.modules())
        self._outside = {id(x): x for x in (*whole.modules(), *whole.parameters())}
        self._leaves = {
            id(leaf): params[id(module._parameters), name]
            for module in self._originals
            for name, leaf in module._parameters.items()
            if leaf is not None
        }
        self._buffers = len(set(buffers.values()))
        self._number = {id(module): i for i, module in enumerate(self._originals)}
        self._parts = [
            _part(module, self._number, params, buffers, shells, self._outside, around.get(id(module)))
            for module in self._originals
        ]
        self._check_own(whole)
        self.flag = Flag()
        self._hooks, self._tables, self._children = tables(self.flag)
        self.shared = Shared(root)
        self._lay_out()

    def _check_own(self, whole: nn.Module) -> None:
        """Refuse attributes of a unit that hold parameters of modules outside of it."""
        others = {id(leaf): path for path, leaf in whole.named_parameters() if id(leaf) not in self._leaves}
        for module, part in zip(self._originals, self._parts, strict=True) if others else ():
            for name in part.referring:
                if held := [others[i] for i in _known(part.attributes[name], self._outside) if i in others]:
                    raise UnitError(
                        f"the attribute {name!r} of a {type(module).__name__} in a unit holds parameters of modules "
                        f"outside of the unit, such as {held[0]}, which are not given to it: pass them to its call, or "
                        f"take more, or fewer, modules as units"
                    )

    def reaches(self) -> list[str]:
        """Return what attributes of its modules hold of modules outside of it: ``"tail, by 'others' of a Block"``."""
        whole: Any = next(iter(self._outside.values()))
        paths = {id(module): path for path, module in whole.named_modules() if id(module) not in self._number}
        return [
            f"{paths[i]}, by {name!r} of a {type(module).__name__}"
            for module, part in zip(self._originals, self._parts, strict=True)
            for name in part.referring
            for i in sorted(_known(part.attributes.get(name), self._outside), key=list(self._outside).index)
            if i in paths
        ]

    def watched_outside(self) -> Elsewhere | None:
        """The modules outside of it that attributes of its modules hold; None if they hold none."""
        whole: Any = next(iter(self._outside.values()))
        known = {id(module): (path, module) for path, module in whole.named_modules()}
        held = [i for part in self._parts for n in part.referring for i in _known(part.attributes[n], self._outside)]
        found = {id(m): m for i in held if i in known for m in known[i][1].modules() if id(m) not in self._number}
        return Elsewhere({known[i][0]: module for i, module in found.items()}) if found else None

    def _lay_out(self) -> None:
        paths = {id(module): path for path, module in self.root.named_modules()}
        entries = [part.attributes | _EMPTY | {"_buffers": dict(part.buffers)} for part in self._parts]
        views = [
            view(paths[id(module)], found, (*part.referring, *part.replaced))
            for module, part, found in zip(self._originals, self._parts, entries, strict=True)
        ]
        sizes = [
            len(found | dict.fromkeys(part.replaced)) + len(found["_buffers"])
            for part, found in zip(self._parts, entries, strict=True)
        ]
        self.views: Sequence[TableView] = views
        hidden = self._hidden()
        self.scene = Scene(views, sizes, hidden)
        below: dict[int, tuple[Sequence[int], Scene]] = {}
        for i, part in enumerate(self._parts):
            if part.shell is not None:
                numbers = self._inside(i)
                unit = part.shell.views
                seen = [replace(views[n], path=unit[k].path) for k, n in enumerate(numbers)]
                within = [k for k, n in enumerate(numbers) if n in hidden]
                below[i] = numbers, Scene(seen, [sizes[n] for n in numbers], within)
        self._below = below

    def _inside(self, number: int) -> list[int]:
        """The numbers of a module and those in it."""
        return [self._number[id(module)] for module in self._originals[number].modules()]

    def _hidden(self) -> set[int]:
        """The numbers of modules of units that code outside can reach by the table of the unit's children alone."""
        if any(part.referring for part in self._parts):
            return set()
        parents: dict[int, set[int]] = {}
        for i, part in enumerate(self._parts):
            for _, child in part.children:
                parents.setdefault(child, set()).add(i)
        units = [self._inside(i) for i, part in enumerate(self._parts) if part.shell is not None]
        return {n for numbers in units for n in numbers[1:] if parents[n] <= set(numbers)}

    def make(self, leaves: Sequence[Any]) -> Instance:
        """An instance that holds these tensors, and no buffers yet."""
        modules = [object.__new__(part.kind) for part in self._parts]
        places: list[list[Place]] = [[] for _ in range(self._buffers)]
        tensors = InstanceTensors(leaves, places)
        memo: dict[int, Any] = {}
        for module, part in zip(modules, self._parts, strict=True):
            table, buffers = self._table(part, leaves, modules, memo)
            for name, i in part.buffers:
                if i >= 0:
                    places[i].append((buffers, name))
            table["_apply"] = partial(converted, weakref.ref(module))
            if part.around is not None:
                table["forward"] = surrounded(part.around, weakref.ref(module), part.signature)
            object.__setattr__(module, "__dict__", table)
        for i, (numbers, scene) in self._below.items():
            below = UnitModules(tensors, [modules[n] for n in numbers], scene, self.flag, numbers, self.moved)
            self._hand_over(i, tensors, below, modules[i])
        if any(part.referring for part in self._parts):
            tensors.more += self._redirect(modules, leaves, memo)
        return Instance(tensors, modules, Surface(self.scene, modules, self.flag, tensors.more))

    def _table(self, part: _Part, leaves: Sequence[Any], modules: Sequence[Any], memo: dict[int, Any]) -> Any:
        """The dict of a module of an instance, and the table of buffers in it."""
        hooks, tables = self._hooks, self._tables
        table = part.attributes.copy()
        table["_parameters"] = tables([(name, None if i < 0 else leaves[i]) for name, i in part.params])
        children = self._children if part.shell is not None else tables
        table["_modules"] = children([(name, None if i < 0 else modules[i]) for name, i in part.children])
        table["_buffers"] = dict.fromkeys([name for name, _ in part.buffers])
        for name in HOOKS:
            table[name] = hooks() if not table[name] else _filled(hooks(), table[name])
        for name in part.holding:
            table[name] = copied(table[name], memo)
        return table, table["_buffers"]

    def glance(self, instance: Instance) -> Glance:
        """A quick check of all modules of an instance for writes."""
        return self.scene.glance(instance.modules, self.flag, instance.tensors.more)

    def tensors(self) -> dict[str, Tensor]:
        """By name, the tensors in attributes, which all instances share."""
        return {
            f"{seen.path}.{name}" if seen.path else name: x
            for seen, part in zip(self.views, self._parts, strict=True)
            for name, value in part.attributes.items()
            for x in (inside(value) if name not in (*BASE, *part.referring) else ())
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
        }

    def moved(self, leaves: Sequence[Any], modules: Mapping[int, nn.Module]) -> str | None:
        """The name under which modules of an instance hold another module or parameter than at first; None if none do.

        Args:
            leaves: the tensors of the instance.
            modules: by number, the modules: all of them, or a unit's.
        """
        if not self.flag.raised:
            return None
        for number, module in modules.items():
            seen, part = self.views[number], self._parts[number]
            for table, kept in (
                (module._parameters, {name: None if i < 0 else leaves[i] for name, i in part.params}),
                (module._modules, {name: None if i < 0 else modules[i] for name, i in part.children}),
            ):
                names = [name for name in {**kept, **table} if kept.get(name, table) is not table.get(name, kept)]
                if names:
                    return f"{seen.path}.{names[0]}" if seen.path else str(names[0])
        return None

    def kind(self) -> Hashable:
        """A key, equal for templates whose instances with the same tensors compute the same."""
        return tuple(
            (
                part.kind,
                tuple(sorted((name, _fixed(value)) for name, value in part.attributes.items() if name not in HOOKS)),
                tuple(_fixed(part.attributes.get(name)) for name in HOOKS),
                *(part.children, part.params, part.buffers, part.around),
                id(self) if part.referring or part.shell else None,
            )
            for part in self._parts
        )

    def tables(self) -> list[tuple[type[nn.Module], Mapping[str, Any]]]:
        """The class and the attributes of each module."""
        return [(part.kind, part.attributes) for part in self._parts]

    def _hand_over(self, number: int, tensors: InstanceTensors, below: UnitModules, module: nn.Module) -> None:
        part = self._parts[number]
        assert part.shell is not None
        forward = part.shell.forward(tensors, below)
        vars(forward)["__signature__"] = part.signature
        vars(module)["forward"] = forward

    def _redirect(self, modules: Sequence[nn.Module], leaves: Sequence[Any], copies: Mapping[int, Any]) -> list[More]:
        """Make attributes that refer to modules and parameters of the template refer to those of the instance."""
        memo: dict[int, Any] = dict(self._outside) | dict(copies)
        memo |= {old: leaves[number] for old, number in self._leaves.items()}
        memo |= {id(old): new for old, new in zip(self._originals, modules, strict=True)}
        made: list[More] = []
        for i, (module, part) in enumerate(zip(modules, self._parts, strict=True)):
            for name in part.referring:
                if name in part.attributes and name not in part.replaced:
                    value = copy.deepcopy(part.attributes[name], dict(memo))
                    vars(module)[name] = _filled(self._hooks(), value) if name in HOOKS else value
                    made.append((i, name, outline(vars(module)[name])))
        return made


def _filled(made: OrderedDict[Any, Any], entries: Mapping[Any, Any]) -> OrderedDict[Any, Any]:
    """Fill a table without raising its flag."""
    for key, value in entries.items():
        OrderedDict.__setitem__(made, key, value)
    return made


_EMPTY: dict[str, Any] = {name: {} for name in (*_TABLES, "_apply")}


def _part(
    module: nn.Module,
    number: Mapping[int, int],
    params: Numbers,
    buffers: Numbers,
    shells: Mapping[int, Shell],
    whole: Mapping[int, Any],
    around: AroundCall | None,
) -> _Part:
    shell = shells.get(id(module))
    around = None if shell else around  # it runs inside of the unit
    kind = _quiet(type(module)) if shell else type(module)
    attributes = _attributes(module, shell is not None)
    referring = tuple(k for k, v in attributes.items() if k not in CACHES and _known(v, whole))
    return _Part(
        kind=kind,
        attributes=attributes,
        children=tuple((name, number.get(id(child), -1)) for name, child in module._modules.items()),
        params=_numbered(module._parameters, params),
        buffers=_numbered(module._buffers, buffers),
        referring=referring,
        holding=tuple(k for k, v in attributes.items() if k not in (*(BASE - CACHES), *referring) and holds(v)),
        shell=shell,
        signature=inspect.signature(module.forward) if shell or around else None,
        around=around,
    )


def _fixed(value: Any) -> Hashable:
    """A key, equal for plain values that a program cannot tell apart; any other value equals itself alone."""
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        return type(value).__name__, repr(value)
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *map(_fixed, value)
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, *sorted(map(repr, map(_fixed, value)))
    if isinstance(value, dict):
        # Keys of hooks are numbers that differ from module to module and mean nothing.
        return type(value).__name__, *((key if isinstance(key, str) else "", _fixed(x)) for key, x in value.items())
    return "object", id(value)


def _numbered(entries: Mapping[str, Tensor | None], numbers: Numbers) -> tuple[tuple[str, int], ...]:
    return tuple((name, numbers.get((id(entries), name), -1)) for name in entries)


def _attributes(module: nn.Module, shell: bool) -> dict[str, Any]:
    """The attributes that instances share. A shell has no hooks: they run inside of the unit."""
    table = {name: value for name, value in vars(module).items() if name not in _TABLES}
    return table | {name: {} for name in HOOKS} if shell else table


def _quiet(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a shell, without a ``__call__`` of its own: that runs inside of the unit, and must not run twice."""
    if kind.__call__ is nn.Module.__call__:
        return kind
    return type(kind.__name__, (kind,), {"__call__": nn.Module.__call__, "__module__": kind.__module__})


class _Probe(dict[int, Any]):
    """A memo for ``copy.deepcopy`` that records whether the copy met known objects."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__()
        self.known = known
        self.found: set[int] = set()

    def get(self, key: int, default: Any = None) -> Any:
        """The object itself, if it is known."""
        if key in self.known:
            self.found.add(key)
            return self.known[key]
        return super().get(key, default)


def _known(value: Any, known: Mapping[int, Any]) -> set[int]:
    """The identities of known objects that a value is, or holds."""
    if value is None or isinstance(value, (bool, int, float, str, type, FunctionType, Tensor)):
        return {id(value)} & known.keys()
    probe = _Probe(known)
    copy.deepcopy(value, probe)
    return probe.found
