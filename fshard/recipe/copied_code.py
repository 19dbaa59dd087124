"""Copies of functions for scripts: the source of those that a script needs, with their imports."""

import ast
import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from fshard.recipe import script_pieces, script_readers

HEAD = """
import contextlib, functools, itertools, math, random
import torch
from torch.nn import functional
import fshard as fs
"""
"""The modules that scripts themselves may import."""

Definition = tuple[Any, str]
"""A function or class, and the source that it is in."""


def copied(text: str) -> str:
    """The imports and definitions that a text needs, with those that these need themselves."""
    sources = [HEAD, *map(inspect.getsource, (script_readers, script_pieces))]
    nodes = [(node, source) for source in sources for node in ast.parse(source).body]
    defined = {node.name: (node, source) for node, source in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    needed = _needed(text, defined)
    imports = {line for node, _ in nodes for line in _imports(node, needed)}
    groups = [sorted(line for line in imports if _origin(line) == origin) for origin in range(3)]
    head = "\n\n".join("\n".join(group) for group in groups if group)
    return head + "\n\n\n" + "".join(f"{_source(*defined[name])}\n\n\n" for name in defined if name in needed)


def _needed(text: str, defined: Mapping[str, Definition]) -> set[str]:
    """The names that a text reads, and those that the definitions of these read."""
    needed, open_ = set[str](), _names(ast.parse(text))
    while open_:
        name = open_.pop()
        needed.add(name)
        open_ |= (_names(defined[name][0]) if name in defined else set()) - needed
    return needed


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _imports(node: ast.AST, needed: set[str]) -> list[str]:
    """The lines of an import that bring needed names, a name a line."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return []
    names = [each for each in node.names if (each.asname or each.name.partition(".")[0]) in needed]
    return [ast.unparse(type(node)(**{**vars(node), "names": [each]})) for each in names]


def _origin(line: str) -> int:
    """The group of an import: Python's own, others, fshard."""
    package = re.split(r"[ .]", line)[1]
    return 2 if package == "fshard" else int(package not in sys.stdlib_module_names)


def _source(node: Any, source: str) -> str:
    begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(source.splitlines()[begin - 1 : node.end_lineno])
