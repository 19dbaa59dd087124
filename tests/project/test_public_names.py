"""The public names are a list in a file: a name that comes or goes shows in a diff of it.

To update the list after a change that was meant, see ``REMEDY``.
"""

import ast
import inspect
import tomllib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _pytest.doctest import DoctestModule

import fshard
from conftest import pytest_itemcollected
from fshard.runtime.engine import batch

LIST = Path(__file__).with_name("public_names.txt")
REMEDY = "If this is meant: python -m tests.project.test_public_names > tests/project/public_names.txt"


def public_names(package: ModuleType, prefix: str = "") -> Iterator[str]:
    """The names in ``__all__``, and under a public module its own as ``optim.adamw``.

    A module without ``__all__`` exports its classes: that is ``errors``, whose functions build messages.
    """
    for name in sorted(_exported(package)):
        value = getattr(package, name)
        yield prefix + name
        if isinstance(value, ModuleType):
            yield from public_names(value, f"{prefix}{name}.")


def _exported(package: ModuleType) -> list[str]:
    """The names that a module means to export."""
    if hasattr(package, "__all__"):
        return list(package.__all__)
    classes = inspect.getmembers(package, inspect.isclass)
    return [name for name, value in classes if value.__module__ == package.__name__ and name[0] != "_"]


def defined() -> Iterator[str]:
    """The public classes and functions as ``fshard.optim.adamw.adamw``: each by the module that defines it."""
    for name in public_names(fshard):
        value = attrgetter(name)(fshard)
        if inspect.isclass(value) or inspect.isfunction(value):
            yield f"{value.__module__}.{value.__qualname__}"


def test_the_public_names_are_the_listed_ones() -> None:
    found, listed = set(public_names(fshard)), set(LIST.read_text().split())
    assert not found - listed, f"exported but not listed: {sorted(found - listed)}. {REMEDY}"
    assert not listed - found, f"listed but not exported: {sorted(listed - found)}. {REMEDY}"


def test_what_type_checkers_see_is_what_is_imported_later() -> None:
    body = ast.parse(Path(fshard.__file__).read_text()).body
    block = next(node for node in body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert dict(fshard._LATER) == {node.module: " ".join(name.name for name in node.names) for node in imports}


def test_no_name_is_exported_twice() -> None:
    names = list(public_names(fshard))
    assert len(names) == len(set(names))


def test_public_names_have_docstrings() -> None:
    for name in public_names(fshard):
        value = attrgetter(name)(fshard)
        if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value):
            generated = inspect.isclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")
            assert value.__doc__ and not generated, f"fshard.{name} has no docstring"


def test_examples_of_public_names_read_no_other_names(request: pytest.FixtureRequest) -> None:
    module = DoctestModule.from_parent(request.session, path=Path(batch.__file__))
    items = {item.name.removeprefix(f"{batch.__name__}."): item for item in module.collect()}
    for item in items.values():
        pytest_itemcollected(item)
    assert items["Microbatches"].dtest.globs == {"torch": torch, "fs": fshard}
    assert "Microbatches" in items["formed"].dtest.globs


def test_the_version_is_that_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert fshard.__version__ == project["version"]


def test_a_name_that_comes_or_goes_is_noticed() -> None:
    package, inner = ModuleType("package"), ModuleType("package.inner")
    inner.__dict__.update(__all__=["f"], f=len, hidden=len)
    package.__dict__.update(__all__=["inner", "g"], inner=inner, g=len, other=len)
    assert list(public_names(package)) == ["g", "inner", "inner.f"]


if __name__ == "__main__":
    print(*public_names(fshard), sep="\n")
