"""The values that a unit's Python reads beside its arguments: globals, closures, defaults, attributes.

A graph holds these values as they were in the trace, so each call must check that they are unchanged. The trace records
which code ran; a walk from the unit's function then finds every value that this code can name: globals, cells of
closures, defaults, and attributes, of classes and of all objects reached, whose names occur in the code, or all where
it makes up names. Containers and arrays are compared with copies. The check is one generated expression of identity
tests, a few nanoseconds each. Other state without a name (extensions written in C) is not seen; the comparison of a
graph's first call sees it if it changes by then.
"""

import functools
import gc
import os
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fshard.model.unit import Unit
from fshard.runtime.graphs.trace_unit import PLAIN, UntraceableUnit, exact

MOST = 2000
"""The most values that a unit may reach, or a container hold: each is compared at every call."""

LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "fshard", "optree", "numpy", "sympy"))
"""Packages whose globals and classes are assumed to be constant."""

MACHINERY = frozenset(vars(nn.Module())) - {"training"}
"""PyTorch's own attributes of modules. No user reaches the hooks of the private copy that ``split`` makes."""

HOLDERS = frozenset(
    "types argparse enum collections builtins threading _thread weakref multiprocessing.sharedctypes".split()
)
"""Modules of the standard library whose objects hold values of the user."""

CONTAINERS = (dict, list, set, deque)

VIEWS = (types.MappingProxyType, KeysView, ValuesView, ItemsView)

MAKES_NAMES = frozenset(("getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "eval", "exec"))
"""Names in code that may read attributes under any name."""

WRAPPERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
    type(functools.lru_cache(len)): ("__wrapped__",),
    Unit: ("fn",),
}
"""By kind of callable, the attributes that hold what it calls."""


@dataclass
class SurroundingReads:
    """The code that ran in a trace, each with the globals that it ran with."""

    codes: dict[types.CodeType, dict[str, Any]] = field(default_factory=dict)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The names in code that can read attributes of the user's objects."""
        modules = ((code, _module(space)) for code, space in self.codes.items())
        own = [code for code, module in modules if not _library(module) or module.startswith("torch.nn")]
        return frozenset(name for code in own for name in code.co_names if not name.startswith("__"))

    @functools.cached_property
    def any_name(self) -> bool:
        """Tell whether code of the user may read attributes under names that do not occur in it."""
        own = [code for code, space in self.codes.items() if not _library(_module(space))]
        return any(MAKES_NAMES & set(code.co_names) for code in own)

    def attributes(self, table: Mapping[str, Any]) -> Set[str]:
        """The names of a table that the code can read."""
        return {name for name in table if isinstance(name, str)} if self.any_name else self.names & table.keys()


@contextmanager
def recorded() -> Iterator[SurroundingReads]:
    """Record the code of calls, without finalizers that the garbage collector happens to call."""
    reads, before, collecting = SurroundingReads(), sys.gettrace(), gc.isenabled()

    def seen(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call":
            reads.codes.setdefault(frame.f_code, frame.f_globals)

    gc.disable()
    sys.settrace(seen)  # a profiler written in C could not be put back
    try:
        yield reads
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()


class Surroundings:
    """The values that a unit's function reads, as they were in its trace; ``UntraceableUnit`` if there are too many."""

    def __init__(self, fn: Any, reads: SurroundingReads) -> None:
        self.reads = reads
        walk = _Walk(reads)
        walk.run(fn)
        self.entries, self.space = walk.entries, walk.space
        terms = [f"{read} {'==' if kept else 'is'} v{n}" for n, (read, (_, kept)) in enumerate(self.entries.items())]
        text = f"def same():\n    try:\n        return {' and '.join(terms) or True}\n    except Exception:\n"
        text += "        return False\n"
        text += f"def read():\n    return [{', '.join(self.entries)}]\n"
        exec(compile(text, "<surroundings of a unit>", "exec"), self.space)
        self.same: Callable[[], bool] = self.space["same"]  # whether all are the same objects as in the trace
        self._note(self.space["read"]())

    def _note(self, values: list[Any]) -> None:
        for number, (value, (_, kept)) in enumerate(zip(values, self.entries.values(), strict=True)):
            if kept and isinstance(value, CONTAINERS):  # a copy, without calling methods of a class of the user's
                value = dict(dict.items(value)) if isinstance(value, dict) else value.copy()
            self.space[f"v{number}"] = value

    def holds(self) -> bool:
        """Tell whether all values are equal to those of the trace; equal numbers may be other objects."""
        if self.same():
            return True
        if self.changed():
            return False
        self._note(self.space["read"]())
        return True

    def forget(self) -> None:
        """Hold from now on, whatever changes: for a unit that runs its own function."""
        self.entries.clear()
        self.same = lambda: True

    def changed(self) -> str:
        """The name of a value that changed; empty if none did."""
        for number, (read, (label, kept)) in enumerate(self.entries.items()):
            try:
                now, then = eval(read, self.space), self.space[f"v{number}"]
                plain = isinstance(now, PLAIN) and isinstance(then, PLAIN)
                alike = bool(now == then) if kept else now is then or (plain and exact(now) == exact(then))
            except Exception:  # it is gone, or holds what cannot be compared
                alike = False
            if not alike:
                return label
        return ""


class _Walk:
    """Collects expressions that read values, each with a name for people and whether its value is a container."""

    def __init__(self, reads: SurroundingReads) -> None:
        self.reads = reads
        self.entries: dict[str, tuple[str, bool]] = {}
        self.space: dict[str, Any] = {}
        self.spaces: dict[Any, Mapping[str, Any]] = {}
        self.known: dict[int, str] = {}
        self.stack: list[tuple[Any, str]] = []

    def run(self, fn: Any) -> None:
        for code, space in self.reads.codes.items():
            module = _module(space)
            whole = {"globals", "eval", "exec"} & set(code.co_names)
            for name in () if _library(module) else list(space) if whole else code.co_names:
                if name in space and not name.startswith("__"):
                    self.item(space, name, f"the global {name} of {module}")
        if {"environ", "getenv"} & self.reads.names:
            self.keep(os.environ._data, "the environment")  # type: ignore[attr-defined]
        tables = getattr(fn, "tables", None)
        if tables is None:
            self.visit(fn, getattr(fn, "__name__", type(fn).__name__))
        else:
            self.modules(tables())
        while self.stack:
            self.inside(*self.stack.pop())
            if len(self.known) > MOST or len(self.entries) > MOST:
                raise UntraceableUnit(
                    f"its Python reaches more than {MOST} values outside of its arguments: pass fewer"
                )

    def modules(self, tables: Iterable[tuple[type[nn.Module], Mapping[str, Any]]]) -> None:
        """Visit what modules hold. Instances have attributes of their own, which start as these; they share objects."""
        for kind, table in tables:
            self.visit(kind, kind.__name__)
            for name in self.reads.attributes(table) - MACHINERY:
                self.visit(table[name], f"{kind.__name__}.{name}")
            for hook in {**table.get("_forward_hooks", {}), **table.get("_forward_pre_hooks", {})}.values():
                self.visit(hook, f"a hook of {kind.__name__}")

    def name(self, thing: Any) -> str:
        """The name of an object in the generated code."""
        number = self.known.setdefault(id(thing), f"o{len(self.known)}")
        self.space[number] = thing
        return number

    def visit(self, value: Any, label: str) -> None:
        if not isinstance(value, PLAIN) and id(value) not in self.known:
            self.name(value)
            self.stack.append((value, label))

    def item(self, entries: Mapping[str, Any], name: str, label: str) -> None:
        """Add the value that a dict holds under a name."""
        value = entries[name]
        if not (isinstance(value, types.ModuleType) and _library(_module(vars(value)))):
            self.entries[f"{self.name(entries)}[{name!r}]"] = label, False
            self.visit(value, label)

    def read(self, thing: Any, attribute: str, label: str) -> None:
        """Add an attribute."""
        self.entries[f"{self.name(thing)}.{attribute}"] = label, False
        self.visit(getattr(thing, attribute), label)

    def keep(self, container: Any, label: str) -> None:
        """Add the values of a container."""
        if len(container) > MOST:
            raise UntraceableUnit(
                f"its Python reads {label}, which holds {len(container)} values: pass what it needs of it"
            )
        self.entries[self.name(container)] = label, True

    def inside(self, value: Any, label: str) -> None:
        """Visit the values that can be read through a value."""
        parts = next((names for kind, names in WRAPPERS.items() if isinstance(value, kind)), ())
        for name in parts:
            self.visit(getattr(value, name), label)
        if parts:
            return
        if isinstance(value, types.FunctionType):
            self.function(value, label)
        elif isinstance(value, (type, types.ModuleType)):
            self.members(value)
        elif isinstance(value, (tuple, frozenset, *CONTAINERS)):
            if isinstance(value, CONTAINERS):
                self.keep(value, label)
            for part in dict.values(value) if isinstance(value, dict) else value:
                self.visit(part, label)
        elif not self.state(value, label):
            self.thing(value, label)

    def state(self, value: Any, label: str) -> bool:
        """Add what a value holds without attributes; tell whether it does."""
        library = _library(type(value).__module__)
        if isinstance(value, ContextVar):
            self.entries[f"{self.name(value)}.get(None)"] = label, False
        elif isinstance(value, weakref.ref):
            self.entries[f"{self.name(value)}()"] = label, False
            self.visit(value(), label)
        elif isinstance(value, VIEWS) and library:
            for part in gc.get_referents(value):
                self.visit(part, label)
        elif isinstance(value, Tensor):  # a trace refuses all reads of its numbers but this one
            numbers = "{0}._version" if "tolist" in self.reads.names else "None"
            entry = f"({numbers}, {{0}}.shape, {{0}}.dtype, {{0}}.requires_grad)"
            self.entries[entry.format(self.name(value))] = label, True
        elif size := _bytes(value):
            if size > 8 * MOST:
                raise UntraceableUnit(f"its Python reads {label}, which holds {size} bytes: pass what it needs of it")
            self.entries[f"memoryview({self.name(value)}).tobytes()"] = label, True
        elif library and isinstance(value, Iterator) and type(value) is not weakref.ProxyType:
            raise UntraceableUnit(f"its Python reads {label}, an iterator, which cannot be watched: pass what it gives")
        else:
            return False
        return True

    def function(self, value: types.FunctionType, label: str) -> None:
        if value.__code__ not in self.reads.codes:
            return
        self.read(value, "__code__", f"the code of {value.__name__}")  # reloaders of notebooks replace it
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # nothing is in it yet
                continue
            closed = f"{name}, over which {value.__name__} closes"
            self.entries[f"{self.name(cell)}.cell_contents"] = closed, False
            self.visit(held, closed)
        for attribute in ("__defaults__", "__kwdefaults__"):
            if getattr(value, attribute):
                self.read(value, attribute, f"the defaults of {value.__name__}")

    def members(self, value: Any) -> None:
        kinds = value.__mro__ if isinstance(value, type) else (value,)
        missing = set(self.reads.names)
        for kind in kinds:
            if _library(kind.__module__ if isinstance(kind, type) else kind.__name__):
                continue
            space = self.spaces.setdefault(kind, vars(kind))
            for attribute in missing & space.keys() | {name for name in space if self.ran(space[name])}:
                self.item(space, attribute, f"{kind.__name__}.{attribute}")
            missing -= space.keys()

    def ran(self, method: Any) -> bool:
        """Tell whether the trace has called a method: those of Python's protocols have no names in code."""
        return isinstance(method, types.FunctionType) and method.__code__ in self.reads.codes

    def thing(self, value: Any, label: str) -> None:
        kind, library = type(value), _library(type(value).__module__) and not isinstance(value, nn.Module)
        if library and kind.__module__ not in HOLDERS:
            return
        table = getattr(value, "__dict__", None)
        if isinstance(table, dict):
            for name in list(table) if library else self.reads.attributes(table):
                self.item(table, name, f"{label}.{name}")
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in self.reads.names & set((slots,) if isinstance(slots, str) else slots):
                if hasattr(value, name):
                    self.read(value, name, f"{label}.{name}")
        if isinstance(value, nn.Module):
            for name in value._modules:
                self.item(value._modules, name, f"{label}.{name}")
        self.visit(kind, kind.__name__)


def _bytes(value: Any) -> int:
    """The size of an array; zero for all else."""
    try:
        return memoryview(value).nbytes
    except (TypeError, ValueError, BufferError):
        return 0


def _module(space: Mapping[str, Any]) -> str:
    return str(space.get("__name__", ""))


def _library(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


NOTHING = Surroundings(None, SurroundingReads())
"""No surroundings."""
