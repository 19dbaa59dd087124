"""Links to public names: ``fs.make_plan`` in text leads to its page, and so does ``Plan`` in a signature."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.transforms.post_transforms import SphinxPostTransform

import fshard

LIST = Path(__file__).parents[1] / "tests" / "project" / "public_names.txt"
SHOWN = re.compile(r"fs\.((?:\w+\.)*\w+)")


def lookup(name: str) -> Any:
    """What a public name stands for."""
    value: Any = fshard
    for part in name.split("."):
        value = getattr(value, part)
    return value


NAMES = frozenset(LIST.read_text().split())
ROOMS = frozenset(name for name in NAMES if isinstance(lookup(name), ModuleType))
DEFINED = {
    f"{value.__module__}.{value.__qualname__}": f"fshard.{name}"
    for name in sorted(NAMES)
    if hasattr(value := lookup(name), "__qualname__")
}
"""The public name by the module in which a function or class is defined, which annotations lead to."""


class NamesInText(SphinxPostTransform):
    """Literals that begin with a public name become links to it."""

    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        for literal in list(self.document.findall(nodes.literal)):
            found = SHOWN.match(literal.astext())
            if found is None or found[1] not in NAMES or isinstance(literal.parent, nodes.reference):
                continue
            link = resolved(self.app, self.env.docname, f"fshard.{found[1]}", literal.deepcopy())
            if link is not None:
                literal.replace_self(link)


def resolved(app: Sphinx, page: str, target: str, shown: Element) -> Element | None:
    """A link to the entry of a public name."""
    python = app.env.get_domain("py")
    entry = python.objects.get(target)
    if entry is None:
        return None
    role = "mod" if entry.objtype == "module" else "obj"
    node = pending_xref("", refdomain="py", reftype=role, reftarget=target)
    return python.resolve_xref(app.env, page, app.builder, role, target, node, shown)


def of_annotation(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: Element) -> Element | None:
    """The link of a name that an annotation gives with the module of its definition."""
    target = DEFINED.get(str(node.get("reftarget")))
    return None if target is None else resolved(app, str(node.get("refdoc")), target, shown)


def of_assignment(app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """The text under an assignment, of a name that a room imports from the module that assigns it."""
    short = name.rpartition(".")[2]
    for module in [name for name in sys.modules if kind == "data" and name.startswith("fshard.")]:
        if vars(sys.modules[module]).get(short) is value:
            told = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", short))
            lines[:] = told or lines


def own_sources(app: Sphinx) -> list[Any]:
    """Leave out what an entry's class or value has from other packages, which has no page of its source."""
    modules = getattr(app.env, "_viewcode_modules", {})
    for module in [module for module in modules if not module.startswith("fshard")]:
        del modules[module]
    return []


def back_links(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """From a source to its entry. Viewcode takes one room for all names of a module, and some have two."""
    module = page.removeprefix("_modules/").replace("/", ".")
    entries = app.env.get_domain("py").objects

    def mended(link: re.Match[str]) -> str:
        parts = link[1].split(".")
        short, *member = parts[2:] if parts[1] in ROOMS else parts[1:]
        target = DEFINED.get(f"{module}.{short}")
        return link[0] if link[1] in entries or target is None else f'#{".".join([target, *member])}"'

    if module.startswith("fshard."):
        context["body"] = re.sub(r'#(fshard\.[\w.]+)"', mended, context["body"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Join the build."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"  # as docstrings call them
    app.connect("missing-reference", of_annotation)
    app.connect("autodoc-process-docstring", of_assignment)
    app.connect("html-collect-pages", own_sources, priority=100)  # before viewcode's own
    app.connect("html-page-context", back_links)
    app.add_post_transform(NamesInText)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
