"""Instances: copies of a module's structure that hold given tensors where the module holds its parameters.

``torch.func.functional_call`` puts tensors into the module and takes them out again after the call. That is wrong as
soon as code of the module runs later: a checkpointed region that is computed again in the backward finds other weights.
An instance belongs to one set of tensors for as long as anything refers to it, so whatever holds a reference to one of
its modules finds the right ones; and calls of one model do not disturb each other.

The structure is compiled once into a ``Template``; making an instance then costs one or two microseconds a module.
While an engine runs the program its tensors are the same objects in every step, and their instance is kept with them.
"""

import copy
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fshard.model.buffers import Place, Tracker
from fshard.model.conversion import convert
from fshard.model.leaves import LeafOrder
from fshard.model.unit import Unit, slot_of

Numbers = Mapping[tuple[int, str], int]
"""The number of the leaf that belongs into a place, by the identity of the template's dict and the name in it."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, eq=False)
class Shell:
    """What stands for a unit in the code around it: it hands the call over.

    Attributes:
        unit: who gets the call.
        params: the order of the unit's parameters, and their numbers among the leaves of the whole.
        buffers: by their path in the unit, the numbers of its buffers.
    """

    unit: Unit
    params: tuple[LeafOrder, tuple[int, ...]]
    buffers: Mapping[str, int]

    def forward(self, instance: "Instance") -> Callable[..., Any]:
        """The forward of the module in an instance."""
        unit, buffers = self.unit, self.buffers
        order, numbers = self.params
        params = order.tree([instance.leaves[i] for i in numbers])

        def plain(*args: Any, **kwargs: Any) -> Any:
            return unit(params, *args, **kwargs)

        def stateful(*args: Any, **kwargs: Any) -> Any:
            now = {path: instance.bound(i) for path, i in buffers.items()}
            out, changed = unit(params, now, *args, **kwargs)
            for path, buffer in changed.items():
                instance.bind(buffers[path], buffer)
            return out

        return stateful if buffers else plain


class Instance:
    """One copy of a structure.

    Attributes:
        root: the module to call.
        leaves: the tensors that it holds as parameters.
        places: for every buffer, the places that it fills.
        busy: whether a call is under way.
    """

    __slots__ = ("busy", "leaves", "places", "root")

    def __init__(self, leaves: Sequence[Any], places: Sequence[Sequence[Place]], root: nn.Module) -> None:
        self.leaves = leaves
        self.places = places
        self.root = root
        self.busy = False

    def bind(self, number: int, buffer: Any) -> None:
        """Put a buffer into all of its places."""
        for entries, name in self.places[number]:
            entries[name] = buffer

    def bound(self, number: int) -> Any:
        """The buffer that the modules hold now."""
        entries, name = self.places[number][0]
        return entries[name]


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """One module of a template; numbers are of modules, parameters and buffers, and -1 stands for None."""

    kind: type[nn.Module]
    attributes: dict[str, Any]
    children: tuple[tuple[str, int], ...]
    params: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    referring: tuple[str, ...]  # attributes that refer to modules of the structure by other ways than as children
    shell: Shell | None


class Template:
    """A structure, compiled.

    Args:
        root: the module.
        whole: the module that ``root`` is a part of.
        params: numbers of the parameters.
        buffers: numbers of the buffers.
        shells: by identity, the modules that are units.
    """

    def __init__(
        self, root: nn.Module, whole: nn.Module, params: Numbers, buffers: Numbers, shells: Mapping[int, Shell]
    ) -> None:
        self.root = root
        self._originals = list(root.modules())
        self._outside = {id(module): module for module in whole.modules()}
        self._buffers = len(set(buffers.values()))
        number = {id(module): i for i, module in enumerate(self._originals)}
        self._parts = [
            _Part(
                kind=_quiet(type(module)) if id(module) in shells else type(module),
                attributes=_attributes(module, id(module) in shells),
                children=tuple((name, number.get(id(child), -1)) for name, child in module._modules.items()),
                params=_numbered(module._parameters, params),
                buffers=_numbered(module._buffers, buffers),
                referring=tuple(k for k, v in vars(module).items() if k not in _TABLES and _refers(v, self._outside)),
                shell=shells.get(id(module)),
            )
            for module in self._originals
        ]

    def make(self, leaves: Sequence[Any]) -> Instance:
        """An instance that holds these tensors, and no buffers yet."""
        modules = [object.__new__(part.kind) for part in self._parts]
        places: list[list[Place]] = [[] for _ in range(self._buffers)]
        instance = Instance(leaves, places, modules[0])
        for module, part in zip(modules, self._parts, strict=True):
            table = part.attributes.copy()
            table["_parameters"] = {name: None if i < 0 else leaves[i] for name, i in part.params}
            table["_modules"] = {name: None if i < 0 else modules[i] for name, i in part.children}
            table["_buffers"] = buffers = dict.fromkeys([name for name, _ in part.buffers])
            for name, i in part.buffers:
                if i >= 0:
                    places[i].append((buffers, name))
            table["_apply"] = MethodType(convert, module)
            if part.shell is not None:
                table["forward"] = forward = part.shell.forward(instance)
                vars(forward)["__wrapped__"] = part.kind.forward.__get__(module)  # for inspect.signature
            object.__setattr__(module, "__dict__", table)
        if any(part.referring for part in self._parts):
            self._redirect(modules)
        return instance

    def kind(self) -> Hashable:
        """Equal for two templates whose instances, with the same tensors in the same places, do the same."""
        return tuple(
            (
                part.kind,
                tuple(sorted((name, _fixed(value)) for name, value in part.attributes.items() if name not in _HOOKS)),
                tuple(_fixed(part.attributes.get(name)) for name in _HOOKS),
                *(part.children, part.params, part.buffers),
                id(self) if part.referring or part.shell else None,
            )
            for part in self._parts
        )

    def _redirect(self, modules: Sequence[nn.Module]) -> None:
        """Let attributes that refer to modules of the template refer to those of the instance."""
        memo: dict[int, Any] = dict(self._outside)
        memo |= {id(old): new for old, new in zip(self._originals, modules, strict=True)}
        for module, part in zip(modules, self._parts, strict=True):
            for name in part.referring:
                if name in part.attributes and not (part.shell and name == "forward"):
                    vars(module)[name] = copy.deepcopy(part.attributes[name], dict(memo))


class Body:
    """A structure as a pure function of parameters and buffers.

    Args:
        template: the structure.
        params: the order of the parameters.
        buffers: the order of the buffers.
        tracker: tells which buffers a call changed.
    """

    def __init__(self, template: Template, params: LeafOrder, buffers: LeafOrder, tracker: Tracker) -> None:
        self.params = params
        self.buffers = buffers
        self._template = template
        self._tracker = tracker

    @property
    def module(self) -> nn.Module:
        """The module that the structure was compiled from."""
        return self._template.root

    def kind(self) -> Hashable:
        """Equal for two structures that are the same function: of the same classes, attributes and shape."""
        return self._template.kind(), self.params.paths, self.buffers.paths

    def instance(self, params: Mapping[str, Any]) -> Instance:
        """The structure with the leaves of a tree: the one that was made of them before, unless a call of it runs.

        Raises:
            TreeError: leaves are missing, unknown, no tensors or misshapen.
        """
        leaves = self.params.read(params)
        slot = slot_of(leaves[0]) if leaves else None
        held: Instance | None = None if slot is None else slot.instances.get(self)
        if leaves and held is not None and not held.busy and all(map(operator.is_, held.leaves, leaves)):
            return held  # they have been looked at
        made = self._template.make(self.params.leaves(params))
        slot = slot_of(made.leaves[0]) if made.leaves else None
        if slot is not None:
            slot.instances[self] = made
        return made

    def run(
        self, instance: Instance, given: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Call an instance with these buffers.

        Returns:
            What the module returns, and the buffers that it changed, by path.
        """
        if not given:
            return instance.root(*args, **kwargs), {}
        instance.busy = True
        try:
            return self._run_with_buffers(instance, given, args, kwargs)
        finally:
            instance.busy = False

    def _run_with_buffers(
        self, instance: Instance, given: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        own = self._tracker.clones(given)
        versions = [buffer._version for buffer in own]
        for i, buffer in enumerate(own):
            instance.bind(i, buffer)
        with self._tracker.watch() as watch:
            out = instance.root(*args, **kwargs)
        changed: dict[str, Any] = {}
        now = [instance.bound(i) for i in range(len(own))]
        for i, new in self._tracker.changed(given, own, now, versions, watch):
            changed[self.buffers.paths[i]] = new
            # A region that is computed again in the backward must start from the same values, and write elsewhere.
            instance.bind(i, given[i].clone())
        return out, changed


def _fixed(value: Any) -> Hashable:
    """Equal for two values that a program cannot tell apart; what is no plain value is equal to itself alone."""
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
    """What instances share with the template. A shell has no hooks: they run inside of the unit."""
    table = {name: value for name, value in vars(module).items() if name not in _TABLES}
    return table | {name: {} for name in _HOOKS} if shell else table


def _quiet(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a shell: a ``__call__`` of the class's own belongs inside of the unit, and must not run twice."""
    if kind.__call__ is nn.Module.__call__:
        return kind
    return type(kind.__name__, (kind,), {"__call__": nn.Module.__call__, "__module__": kind.__module__})


class _Probe(dict[int, Any]):
    """A memo for ``copy.deepcopy`` that notes whether the copy came upon certain objects."""

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__()
        self.known = known
        self.found = False

    def get(self, key: int, default: Any = None) -> Any:
        """The object itself where it is a known one."""
        if key in self.known:
            self.found = True
            return self.known[key]
        return super().get(key, default)


def _refers(value: Any, modules: Mapping[int, nn.Module]) -> bool:
    if value is None or isinstance(value, (bool, int, float, str, type, FunctionType, Tensor)):
        return False
    probe = _Probe(modules)
    copy.deepcopy(value, probe)
    return probe.found
