"""The screen of ``fs.trackers.Live`` in a terminal, by rich."""

from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fshard.tracking.history import PARTS, WIDE, History, duration, number_text, value_text

HEIGHT = 8
"""Lines of the curve."""

FIRST = ("loss", "grad_norm", "lr", "elements_per_second", "mfu", "seconds", "exposed", "outside", "memory")
"""The numbers that stand before all others."""

MOST = 18
"""Numbers that are shown; a line says how many there are besides."""


def screen(history: History, total: int | None, width: int) -> Panel:
    """The view of a run in a terminal of so many columns."""
    inner = max(20, width - 4)
    head = _head(history, total, inner)
    if width >= WIDE:
        right = max(44, inner // 3)
        left = inner - right - 2
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=left)
        grid.add_column(width=right)
        grid.add_row(Group(_curve(history, left), Text(""), _time(history, left)), _numbers(history, 1))
        body: Any = grid
    else:
        body = Group(_curve(history, inner), _numbers(history, 2 if inner >= 60 else 1), _time(history, inner))
    return Panel(Group(head, Text(""), body), title="fshard", title_align="left", width=width)


def _head(history: History, total: int | None, width: int) -> Any:
    words = [f"step {history.step:,}" + (f" of {total:,}" if total else "")]
    words += [f"{number_text(history.pace)} steps/s"] if history.pace else []
    left = history.left(total)
    words += [f"{duration(left)} left"] if left else []
    text = Text(", ".join(words), style="bold", no_wrap=True)
    if not total:
        return text
    return Columns([text, ProgressBar(total, history.step, width=max(10, width - len(text) - 2))], padding=(0, 1))


def _curve(history: History, width: int) -> Any:
    known = [value for value in history.values if value == value]
    labels = [number_text(value) for value in ((max(known), min(known)) if known else ())]
    margin = max([len(history.name), *map(len, labels)])
    rows = history.drawn(max(8, width - margin - 1), HEIGHT)
    text = Text(no_wrap=True)
    for at, row in enumerate(rows):
        label = labels[0] if labels and at == 0 else labels[1] if labels and at == HEIGHT - 1 else ""
        label = history.name if at == HEIGHT // 2 else label
        text.append(f"{label:>{margin}} ", style="dim")
        text.append(row + "\n" * (at < HEIGHT - 1), style="cyan")
    return text


def _numbers(history: History, columns: int) -> Any:
    ranked = sorted(history.latest, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    shown = [name for name in ranked if name != "skipped" or history.latest[name]]
    more = len(shown) - MOST
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in range(columns):
        table.add_column(overflow="ellipsis", no_wrap=True, ratio=3, style="dim")
        table.add_column(justify="right", no_wrap=True, ratio=2)
    cells = [(name, value_text(name, history.latest[name])) for name in shown[:MOST]]
    rows = -(-len(cells) // columns)
    for at in range(rows):
        chosen = [cells[at + rows * n] if at + rows * n < len(cells) else ("", "") for n in range(columns)]
        table.add_row(*[Text(cell) for pair in chosen for cell in pair])
    return Group(table, Text(f"and {more} more", style="dim")) if more > 0 else table


def _time(history: History, width: int) -> Any:
    """A bar of where the time of the latest step went."""
    parts: Mapping[str, float] = history.parts()
    whole = sum(parts.values())
    text = Text(no_wrap=True)
    if whole <= 0:
        return text
    for name, style in PARTS:
        text.append("█" * round(parts[name] / whole * width), style=style)
    text.append("\n")
    for name, style in PARTS:
        text.append(f"{name} {parts[name] / whole:.0%}  ", style=style)
    return text
