"""The map of the package: rooms, imports between them, and the places where its shape is worst.

``python -m tests.project.map`` prints it, ``--json`` as data, and ``--against OTHER`` beside the same numbers of
another tree. Source is read, never imported, so any tree will do.

Complexity is McCabe's: one, and one more for each branch: ``if``, ``for``, ``while``, ``except``, ``assert``, ``case``,
conditional expressions, each ``and`` and ``or``, each loop and condition of a comprehension. A function inside of
another one counts for itself.
"""

import argparse
import ast
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.project.layering import LAYERS, Function, Module, Modules, Rule, edges, load

ATTRIBUTES, COMPLEXITY, FILE_LINES, FUNCTION_LINES = 15, 15, 400, 40
"""The most that a class, a function and a file should have."""

PARSERS = (
    "schedule.text",
    "reading.strict_json",
    "checkpoint.manifest",
    "interchange.pickles",
    "interchange.archive",
)
"""Modules that read formats: their functions may have more branches."""

BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case)


def room(module: Module) -> str:
    """The folder of a module inside of the package; of files right under it, ``base`` is what all rooms import."""
    parts = module.name.split(".")[1:]
    return "/".join(parts if module.package else parts[:-1]) or ("base" if module.room in LAYERS[0] else "top")


def own(node: ast.AST) -> Iterator[ast.AST]:
    """What is inside of a node, without the functions and classes defined in it."""
    open_ = [node]
    while open_:
        for child in ast.iter_child_nodes(open_.pop()):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield child
                open_.append(child)


def complexity(function: Function) -> int:
    """McCabe's complexity of a function; see the top of this file.

    >>> complexity(ast.parse("def f(x):\\n  return [y for y in x if y and x] if x else 0").body[0])
    5
    """
    count = 1
    for node in own(function):
        if isinstance(node, BRANCHES):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def length(function: Function) -> int:
    """Lines from the ``def`` on, without the docstring."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return lines - ((first.end_lineno or 0) - first.lineno + 1) * text


def defined(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Each function and class under a node, at any depth, by its qualified name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from defined(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):  # which defines none
            yield from defined(child, prefix)


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement writes."""
    found: list[ast.AST] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found += node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        found.append(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars:
        found.append(node.optional_vars)
    while found:
        target = found.pop()
        if isinstance(target, ast.Attribute):
            yield target
        elif isinstance(target, ast.Tuple | ast.List | ast.Starred):
            found += ast.iter_child_nodes(target)


def attributes(cls: ast.ClassDef) -> set[str]:
    """What objects of a class hold: annotated fields, and what methods assign to ``self``."""
    held = {s.target.id for s in cls.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
    for node in ast.walk(cls):
        held |= {target.attr for target in targets(node) if _is_self(target.value)}
        if (
            isinstance(node, ast.Call)
            and _called(node) == "__setattr__"
            and len(node.args) == 3
            and _is_self(node.args[0])
        ):
            held |= {str(name.value) for name in node.args[1:2] if isinstance(name, ast.Constant)}
    return held


def foreign(module: Module) -> Iterator[ast.AST]:
    """What writes to the attributes of another object than ``self``: targets, and calls of ``setattr``."""
    for node in module.nodes:
        yield from (target for target in targets(node) if not _is_self(target.value))
        if isinstance(node, ast.Call) and _called(node) in ("setattr", "delattr", "__setattr__") and node.args:
            bound = isinstance(node.func, ast.Attribute) and not _names(node.func.value, ("object", "super"))
            if not bound and not _is_self(node.args[0]):
                yield node


def _is_self(node: ast.AST) -> bool:
    return _names(node, ("self", "cls"))


def _names(node: ast.AST, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _uses(module: Module, name: str) -> int:
    return sum(_names(node, (name,)) for node in module.nodes)


def measure(root: Path) -> dict[str, Any]:
    """The numbers of one package.

    Args:
        root: its folder.

    Returns:
        Of plain lists, dicts, strings and ints: ``rooms``, ``imports``, ``classes``, ``functions``, ``long``,
        ``foreign``, ``files`` and ``totals``.
    """
    modules = load(root)
    rooms: dict[str, Counter[str]] = {}
    functions, long, classes, written, files = {}, {}, {}, [], {}
    for module in modules.values():
        lines = module.text.count("\n")
        counts = rooms.setdefault(room(module), Counter())
        counts.update(files=1, lines=lines, Any=_uses(module, "Any"), hasattr=_uses(module, "hasattr"))
        files[module.file] = lines
        for name, node in defined(module.tree):
            place = f"{module.name.partition('.')[2]}.{name}"
            if isinstance(node, ast.ClassDef):
                classes[place] = len(attributes(node))
            else:
                functions[place], long[place] = complexity(node), length(node)
        written_here = sorted(foreign(module), key=lambda node: getattr(node, "lineno", 1))
        found = [module.at(node, ast.unparse(node)) for node in written_here]
        counts.update(foreign=len(found))
        written += found
    totals: Counter[str] = sum(rooms.values(), Counter())
    totals |= Counter(
        {
            "files over 400 lines": sum(n > FILE_LINES for n in files.values()),
            "functions": len(functions),
            "functions over 40 lines": sum(n > FUNCTION_LINES for n in long.values()),
            "functions over complexity 15": len(_complex(functions)),
            "classes over 15 attributes": sum(n > ATTRIBUTES for n in classes.values()),
        }
    )
    return {
        "rooms": {name: dict(rooms[name]) for name in sorted(rooms)},
        "imports": _imports(modules),
        "classes": classes,
        "functions": functions,
        "long": long,
        "foreign": written,
        "files": files,
        "totals": dict(totals),
    }


def _imports(modules: Modules) -> dict[str, dict[str, int]]:
    """How many import statements of a room name another one."""
    out: dict[str, Counter[str]] = {}
    for module in modules.values():
        for target, _ in edges(modules, module):
            if room(target) != room(module):
                out.setdefault(room(module), Counter())[room(target)] += 1
    return {name: dict(out[name].most_common()) for name in sorted(out)}


def _complex(functions: Mapping[str, int]) -> dict[str, int]:
    """Those over the limit, outside of parsers."""
    return {name: n for name, n in functions.items() if n > COMPLEXITY and not name.startswith(PARSERS)}


def complex_functions(modules: Modules) -> list[str]:
    """Functions above ``COMPLEXITY``, outside of ``PARSERS``."""
    return [
        module.at(node, f"{node.name} has a complexity of {found}, above {COMPLEXITY}")
        for module, node in _definitions(modules)
        if not isinstance(node, ast.ClassDef) and (found := complexity(node)) > COMPLEXITY
        if not module.name.partition(".")[2].startswith(PARSERS)
    ]


def large_classes(modules: Modules) -> list[str]:
    """Classes with more than ``ATTRIBUTES`` attributes."""
    return [
        module.at(node, f"{node.name} has {found} attributes, above {ATTRIBUTES}")
        for module, node in _definitions(modules)
        if isinstance(node, ast.ClassDef) and (found := len(attributes(node))) > ATTRIBUTES
    ]


def _definitions(modules: Modules) -> Iterator[tuple[Module, Function | ast.ClassDef]]:
    """Each function and class, with its module."""
    for module in modules.values():
        yield from ((module, node) for _, node in defined(module.tree))


RULES: tuple[Rule, ...] = (complex_functions, large_classes)
"""Rules beside those of ``layering``, which tests hold the package to: functions outside of parsers, and classes."""


def _rows(title: str, new: Mapping[str, int], old: Mapping[str, int] | None, names: list[str]) -> list[str]:
    """One line a name: its number, and the number before."""
    out = ["", title]
    for name in names:
        before = "" if old is None else f"{old.get(name, 0) or '-':>8}  ->"
        out.append(f"{before}{new.get(name, 0) or '-':>8}  {name}")
    return out if names else [*out, "    none"]


def _above(limit: int, new: Mapping[str, int], old: Mapping[str, int], least: int = 0) -> list[str]:
    """The names over a limit now or before, and at least so many, largest first."""
    ranked = sorted({*new, *old}, key=lambda name: (-max(new.get(name, 0), old.get(name, 0)), name))
    over = [name for name in ranked if max(new.get(name, 0), old.get(name, 0)) > limit]
    return over if len(over) >= least else ranked[:least]


def show(new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> str:
    """The map as text; with ``old``, every number beside the one before."""
    past: Mapping[str, Any] = old or {key: type(value)() for key, value in new.items()}
    keys = ("files", "lines", "Any", "hasattr", "foreign")
    head = f"{'room':16}" + "".join(f"{key:>16}" for key in keys)
    out = [head, "-" * len(head)]
    for name in sorted({*new["rooms"], *past["rooms"]}):
        now, before = new["rooms"].get(name, {}), past["rooms"].get(name, {})
        cells = [f"{before.get(key, 0)} -> " * (old is not None) + str(now.get(key, 0)) for key in keys]
        out.append(f"{name:16}" + "".join(f"{cell:>16}" for cell in cells))
    out += _rows("totals", new["totals"], old and past["totals"], list(new["totals"]))
    out += ["", "imports between rooms"]
    for name, row in new["imports"].items():
        before = past["imports"].get(name, {})
        cells = [f"{to} {f'{before.get(to, 0)}->' if old else ''}{row.get(to, 0)}" for to in {**row, **before}]
        out.append(f"    {name}: {', '.join(cells)}")
    tables = [
        (f"attributes of the ten largest classes (at most {ATTRIBUTES})", "classes", ATTRIBUTES, 10),
        (f"complexity over {COMPLEXITY}, outside of parsers", "functions", COMPLEXITY, 0),
        (f"functions over {FUNCTION_LINES} lines, without docstrings", "long", FUNCTION_LINES, 0),
        (f"files over {FILE_LINES} lines", "files", FILE_LINES, 0),
    ]
    for title, key, limit, least in tables:
        one, other = (_complex(m[key]) if key == "functions" else m[key] for m in (new, past))
        names = _above(limit, one, other, least)
        out += _rows(title, new[key], old and past[key], names)
    out += ["", "writes to another object's attributes", *(f"    {place}" for place in new["foreign"])]
    return "\n".join(out)


def package(tree: Path) -> Path:
    """The folder of the package in a tree, which may be that folder itself."""
    return tree / "fshard" if (tree / "fshard").is_dir() else tree


def main() -> None:
    """Print the map."""
    parser = argparse.ArgumentParser(description="The shape of the package, in numbers.")
    parser.add_argument(
        "tree", nargs="?", type=Path, default=Path(__file__).parents[2], help="a checkout, or a package"
    )
    parser.add_argument("--against", type=Path, help="another checkout, whose numbers are printed beside")
    parser.add_argument("--json", action="store_true", help="print data")
    given = parser.parse_args()
    new = measure(package(given.tree))
    old = measure(package(given.against)) if given.against else None
    print(json.dumps({"old": old, "new": new} if old else new, indent=1) if given.json else show(new, old))


if __name__ == "__main__":
    main()
