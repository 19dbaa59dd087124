"""The rules of the house, as functions from a package's source to the places that break them.

Source is read, never imported: a rule sees lazy imports, and a module that fails to import is still checked.
Problems read ``fshard/runtime/arena.py:12: ...``.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAYERS = (
    (
        "errors",
        "tree",
        "version",
        "arguments",
        "writing",
        "patterns",
        "tracebacks",
        "markup",
        "forks",
        "hints",
        "threads",
        "torch_internals",
    ),
    ("reading",),
    ("model", "optim"),
    ("sharding",),
    ("schedule",),
    ("runtime", "data"),
    ("collectives",),
    ("parallel", "played"),
    ("state",),
    ("checkpoint",),
    ("interchange",),
    ("tracking",),
    ("training",),
    ("outer_steps", "pipeline"),
    ("launch", "launching", "lora"),
    ("transform", "generation", "losses"),
    ("parts",),
    ("proof",),
    ("view",),
    ("foresight",),
    ("recipe",),
    ("cli",),
    ("__main__",),
    ("func", "io", "sim", "trackers", "types"),
    ("",),
    ("trainer",),
)
"""The rooms, lowest first; ``""`` is the package's ``__init__``, and ``trainer`` a script on top of it. A room imports
from lower layers only; files right under the package may also import others of their layer."""

FLOORS = (("comm", "flight"), ("memory",), ("engine", "graphs"), ("execution",), ("steps",), ("whole_graph",))
"""The rooms of the runtime, lowest first. A room imports from its own floor and from lower ones."""

OWNERS = {"torch.distributed": "runtime.comm", "optree": "tree"}
"""Who alone may import a library: a module, or a folder with all of its modules."""

EXCEPTIONS = {("interchange.torch_formats", "torch.distributed"), ("torch_internals", "torch.distributed")}
"""Modules that may import a library beside its owner: DTensor and the metadata of torch.distributed.checkpoint are
classes of that library, which must be made to be given back, and some of its names are private. No communication goes
through them."""

EXTRAS = {"tracking.screen", "view.picture"}
"""Files that are wholly of one extra: who wants them imports them late, with an error that names the extra."""

INTERNALS = "torch_internals"
"""The file that alone may use names of PyTorch that are not public."""

SCOPES = {("fshard.collectives.scope", "SCOPE")}
"""The context variables that may be: which mesh an axis name means is a matter of the calls around, as in JAX."""

MUTABLE_CALLS = {
    *(
        "list",
        "dict",
        "set",
        "bytearray",
        "defaultdict",
        "OrderedDict",
        "Counter",
        "deque",
        "ChainMap",
        "count",
    ),
    *("ContextVar", "local", "Lock", "RLock", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet"),
}
MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)

FILE_LINES = 400
FUNCTION_LINES = 60
FUNCTION_LINES_WISHED = 40
FUNCTIONS_THAT_MAY_BE_LONGER = 0.1

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file: ``fshard.runtime.comm``, or ``fshard.runtime`` for an ``__init__``."""

    name: str
    file: str
    text: str
    package: bool

    @cached_property
    def tree(self) -> ast.Module:
        """The source, parsed when a rule asks for it."""
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[tuple[str, ast.stmt], ...]:
        """Each name that the module imports, in full; see `imported`."""
        return tuple(imported(self))

    @property
    def room(self) -> str:
        """The name's second part: a folder or a file right under the package."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def layer(self) -> int | None:
        """The number of the layer, None for a room that no layer has."""
        return next((n for n, rooms in enumerate(LAYERS) if self.room in rooms), None)

    def at(self, node: ast.AST, message: str) -> str:
        """A problem, with its place."""
        return f"{self.file}:{getattr(node, 'lineno', 1)}: {message}"


Modules = Mapping[str, Module]


def load(root: Path) -> dict[str, Module]:
    """Every module under a package's folder, by name."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        modules[name] = Module(name, str(path.relative_to(root.parent)), path.read_text(), package)
    return modules


def imported(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Each name that the module imports, in full (``from a.b import c`` is ``a.b.c``); lazy ones too."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                up = module.name.split(".")
                base = up[: len(up) - node.level + module.package]
                origin = ".".join([*base, origin]) if origin else ".".join(base)
            yield from ((f"{origin}.{alias.name}", node) for alias in node.names)


def edges(modules: Modules, module: Module) -> Iterator[tuple[Module, ast.stmt]]:
    """The package's modules that this one imports. A name that is no module counts for its holder."""
    for name, node in module.imports:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        if name and name != module.name:
            yield modules[name], node


def upward_imports(modules: Modules) -> list[str]:
    """Imports of a higher layer, or of another folder in the same layer."""
    problems = []
    for module in modules.values():
        if module.layer is None:
            problems.append(module.at(module.tree, f"the room {module.room!r} is in no layer of LAYERS"))
            continue
        for target, node in edges(modules, module):
            if target.layer is None or module.room == target.room:
                continue
            folders = any(m.package or m.name.count(".") > 1 for m in (module, target))
            if target.layer > module.layer:
                problems.append(module.at(node, f"imports {target.name}, of a higher layer"))
            elif target.layer == module.layer and folders:
                problems.append(module.at(node, f"imports {target.name}, of another room in the same layer"))
    return problems


def upward_floors(modules: Modules) -> list[str]:
    """Imports of a higher floor of the runtime, and files of it in no room."""
    problems = []
    for module in modules.values():
        floor = _floor(module)
        if floor is None and module.name.startswith("fshard.runtime."):
            problems.append(module.at(module.tree, "lies in no room of the runtime: see FLOORS"))
        for target, node in edges(modules, module) if floor is not None else ():
            other = _floor(target)
            if other is not None and floor is not None and other > floor:
                problems.append(module.at(node, f"imports {target.name}, of a higher floor of the runtime"))
    return problems


def _floor(module: Module) -> int | None:
    parts = module.name.split(".")
    room = parts[2] if parts[:2] == ["fshard", "runtime"] and len(parts) > 2 else ""
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def import_cycles(modules: Modules) -> list[str]:
    """Modules that import each other, directly or through others: one line a cycle."""
    graph = {name: sorted({target.name for target, _ in edges(modules, m)}) for name, m in modules.items()}
    problems, done = [], set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            problems.append("import cycle: " + " -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return problems


def foreign_uses(modules: Modules) -> list[str]:
    """Uses of a library that another module owns: imports, attributes of its parent, names as strings."""
    problems = []
    for module in modules.values():
        for library, owner in OWNERS.items():
            allowed = (module.name.partition(".")[2], library) in EXCEPTIONS
            if not allowed and not _within(module, owner):
                nodes = {n.lineno: n for n in _uses(module, library)}
                problems += [module.at(n, f"uses {library}, which only fshard.{owner} may") for n in nodes.values()]
    return problems


def _within(module: Module, owner: str) -> bool:
    """Whether a module is the owner, or lies in its folder."""
    return f"{module.name.partition('.')[2]}.".startswith(f"{owner}.")


def _uses(module: Module, library: str) -> Iterator[ast.stmt | ast.expr]:
    """Where the module gets at a library."""
    parent, _, child = library.rpartition(".")
    for name, statement in module.imports:
        if f"{name}.".startswith(f"{library}."):
            yield statement
    handles = {parent} | {
        alias.asname or alias.name
        for node in module.nodes
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == parent
    }
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr == child and isinstance(node.value, ast.Name):
            if parent and node.value.id in handles:
                yield node
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and f"{first.value!s}.".startswith(f"{library}."):
                yield node


def early_extras(modules: Modules) -> list[str]:
    """Imports of libraries of extras outside of functions, which would make the library depend on them."""
    base = {"fshard", "torch", "optree", *sys.stdlib_module_names}
    return [
        module.at(node, f"imports {name} where the module is imported; do it in the function that needs it")
        for module in modules.values()
        if module.name.partition(".")[2] not in EXTRAS
        for name, node in module.imports
        if node in module.tree.body and name.partition(".")[0] not in base
    ]


def private_names_of_torch(modules: Modules) -> list[str]:
    """Names of PyTorch that are not public, outside of the file that owns them; ``torch.ops`` may be used."""
    problems = []
    for module in modules.values():
        used = {(node.lineno, name) for name, node in module.imports if name.startswith("torch.")}
        for node in module.nodes:
            if isinstance(node, ast.Attribute):
                name = ast.unparse(node)
                if name.startswith(("torch.", "c10d.", "dist.")) and not name.startswith("torch.ops."):
                    used.add((node.lineno, name))
        if module.name.partition(".")[2] != INTERNALS:
            private = {line: name for line, name in sorted(used) if _private(name)}
            problems += [
                f"{module.file}:{n}: uses {name}; import it from fshard.{INTERNALS}" for n, name in private.items()
            ]
    return problems


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def global_statements(modules: Modules) -> list[str]:
    """Functions that assign to names of their module."""
    return [
        module.at(node, f"global {', '.join(node.names)}")
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.Global)
    ]


def shared_state(modules: Modules) -> list[str]:
    """Values at module or class level that can change: containers, caches, context variables."""
    problems = []
    for module in modules.values():
        for node in _shared_statements(module.tree.body):
            if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id if isinstance(t, ast.Name) else ast.unparse(t) for t in targets]
            constant = all(name.isupper() or name == "__all__" for name in names)
            literal = isinstance(node.value, MUTABLE_NODES) and not constant
            if (module.name, *names) in SCOPES:
                continue
            if literal or (isinstance(node.value, ast.Call) and _called(node.value) in MUTABLE_CALLS):
                problems.append(module.at(node, f"{', '.join(names)} can change and is shared by all callers"))
    return problems


def _shared_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import: module level, class bodies and branches of both, not functions."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            if not isinstance(node, Function):
                yield from _shared_statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _shared_statements(handler.body)


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    function = node.func.value if isinstance(node.func, ast.Subscript) else node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def long_files(modules: Modules) -> list[str]:
    """Files of ``FILE_LINES`` lines or more."""
    counts = {m.file: len(m.text.splitlines()) for m in modules.values()}
    return [f"{file}: {n} lines, {FILE_LINES} or more" for file, n in counts.items() if n >= FILE_LINES]


def functions(modules: Modules) -> Iterator[tuple[Module, Function, int]]:
    """Each function and its length in lines, without its docstring."""
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, Function):
                first = node.body[0]
                doc = first if ast.get_docstring(node, clean=False) is not None else None
                length = (node.end_lineno or 0) - node.lineno + 1
                yield module, node, length - ((doc.end_lineno or 0) - doc.lineno + 1 if doc else 0)


def long_functions(modules: Modules) -> list[str]:
    """Functions above the hard limit; those above the wished one too, when more than one in ten is."""
    sizes = list(functions(modules))
    wished = [(m, f, n) for m, f, n in sizes if n > FUNCTION_LINES_WISHED]
    if len(wished) <= FUNCTIONS_THAT_MAY_BE_LONGER * len(sizes):
        wished = [(m, f, n) for m, f, n in wished if n > FUNCTION_LINES]
    return [module.at(node, f"{node.name} has {n} lines") for module, node, n in wished]


Rule = Callable[[Modules], list[str]]
RULES: tuple[Rule, ...] = (
    upward_imports,
    upward_floors,
    import_cycles,
    foreign_uses,
    early_extras,
    private_names_of_torch,
    global_statements,
    shared_state,
    long_files,
    long_functions,
)
