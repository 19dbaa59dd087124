"""Tables as text; HTML of what shows itself in notebooks: tables that fold, and bars. Text in it is escaped."""

from collections.abc import Iterable, Sequence
from html import escape as escape

FONT = "font:12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
COLORS = ("#5b7fb5", "#d9914b", "#6f9f6f", "#9b7fb0", "#b5656b", "#7fa8ad", "#a89a5b", "#8a8f99")
"""The colors of parts of bars, and of ranks, in turn."""

Part = tuple[str, float]
"""A part of a bar: what it is, and how much."""


def aligned(rows: Sequence[Sequence[str]], left: Sequence[bool], rule: bool = False) -> list[str]:
    """The lines of a table, whose first row are the titles.

    Args:
        rows: the cells.
        left: of each column, whether its cells are set to the left.
        rule: whether a line divides the titles from the rest.

    >>> aligned([["op", "bytes"], ["gather", "8"]], [True, False])
    ['op      bytes', 'gather      8']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [*rows[:1], *[["-" * width for width in widths]] * rule, *rows[1:]]
    form = [("<" if to_left else ">", width) for to_left, width in zip(left, widths, strict=True)]
    return ["  ".join(f"{x:{side}{width}}" for x, (side, width) in zip(row, form, strict=True)) for row in lines]


def shown(title: str, *parts: str) -> str:
    """Return what a notebook shows: a title and what follows it.

    >>> shown("a < b").startswith("<div") and "a &lt; b" in shown("a < b")
    True
    """
    return f'<div style="{FONT}"><b>{escape(title)}</b>{"".join(parts)}</div>'


def fold(summary: str, body: str, opened: bool = False) -> str:
    """A body that a click on its summary shows."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{body}</details>"


def pre(text: str) -> str:
    """Text as it is, which scrolls where it is long."""
    style = "max-height:32em;overflow:auto;margin:4px 0"
    return f'<pre style="{style};{FONT}">{escape(text)}</pre>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table of texts, all columns but the first ones set to the right. A cell that begins with ``<div`` is markup.

    Args:
        head: the titles of the columns.
        rows: the cells.
        left: how many columns are set to the left.
    """
    titles = "".join(_cell("th", text, number < left) for number, text in enumerate(head))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, number < left) for number, text in enumerate(row))}</tr>" for row in rows
    )
    return f'<table style="border-collapse:collapse;{FONT};margin:4px 0"><tr>{titles}</tr>{body}</table>'


def _cell(tag: str, text: str, left: bool) -> str:
    style = f"text-align:{'left' if left else 'right'};padding:1px 10px 1px 0;white-space:nowrap"
    return f'<{tag} style="{style}">{text if text.startswith("<div") else escape(text)}</{tag}>'


def bar(parts: Sequence[Part], most: float, width: int = 260) -> str:
    """A bar of parts, as long as they are beside the most that any bar of the table has."""
    cells = "".join(
        f'<div title="{escape(label)}" style="width:{max(0.0, value) / most * width if most else 0:.1f}px;height:10px;'
        f'background:{COLORS[number % len(COLORS)]}"></div>'
        for number, (label, value) in enumerate(parts)
    )
    return f'<div style="display:flex;width:{width}px">{cells}</div>'


def legend(names: Sequence[str]) -> str:
    """Return what the colors of bars stand for."""
    spans = (
        f'<span style="color:{COLORS[number % len(COLORS)]}">&#9632;</span> {escape(name)} &nbsp;'
        for number, name in enumerate(names)
    )
    return f"<div>{''.join(spans)}</div>"
