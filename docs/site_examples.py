"""A page for each program in examples/: what its first string says, and its text."""

import ast
from pathlib import PurePath
from typing import Any

from docutils.nodes import document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class ExampleParser(MystParser):
    """Reads a program as a Markdown page."""

    supported = ("example",)

    def parse(self, inputstring: str, document: document) -> None:
        """Parse a program."""
        name = PurePath(document["source"]).name
        super().parse(page(name, inputstring), document)


def page(name: str, program: str) -> str:
    """A program as Markdown.

    >>> print(page("a.py", '\"\"\"What it does.\"\"\"\\n\\nx = 1\\n').replace("`", "'"))
    # a.py
    <BLANKLINE>
    What it does.
    <BLANKLINE>
    '''python
    x = 1
    '''
    <BLANKLINE>
    """
    told = ast.get_docstring(ast.parse(program)) or ""
    _, _, code = program.partition('"""\n\n')
    return f"# {name}\n\n{told}\n\n```python\n{code}```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Join the build."""
    app.add_source_suffix(".py", "example")
    app.add_source_parser(ExampleParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
