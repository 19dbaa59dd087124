"""Tables on a terminal: by rich where it is installed, else plain."""

import sys
from collections.abc import Sequence

from fshard.checkpoint.problems import printable


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under heads; columns of numbers to the right. Cells may hold names that strangers chose."""
    rows = [[printable(cell) for cell in row] for row in rows]
    right = [all(row[i][:1].isdigit() or row[i] in ("", "-") for row in rows) for i in range(len(heads))]
    if sys.stdout.isatty() and _rich(heads, rows, right):
        return
    widths = [max(len(head), *(len(row[i]) for row in rows)) if rows else len(head) for i, head in enumerate(heads)]
    for row in (heads, *rows):
        cells = (f"{cell:>{w}}" if r else f"{cell:<{w}}" for cell, w, r in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip())


def _rich(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> bool:
    """Print by rich; whether it is there."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, header_style="bold")
    for head, to_right in zip(heads, right, strict=True):
        table.add_column(head, justify="right" if to_right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)
    return True
