"""Tables of the command line: by rich in a terminal, where it is installed, and else as aligned text."""

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from fshard.markup import aligned
from fshard.reading.files import printable

NUMBER = re.compile(r"[\d,.]+( |%|$)|-?$")
"""A cell that is set to the right, if all of its column are."""


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under heads, with numbers to the right. Cells may hold untrusted names.

    >>> print_table(["op", "bytes"], [["gather", "8"], ["wait", "12"]])
    op      bytes
    gather      8
    wait       12
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    right = [all(NUMBER.match(row[column]) for row in rows) for column in range(len(heads))]
    if title:
        print(title)
    if not sys.stdout.isatty() or find_spec("rich") is None:
        shown = [heads, *rows] if any(heads) else rows
        print("\n".join(line.rstrip() for line in aligned(shown, [not number for number in right])))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", show_header=any(heads))
    for head, to_right in zip(heads, right, strict=True):
        table.add_column(head, justify="right" if to_right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
