"""A view of a run in the terminal; where there is no terminal, a line now and then."""

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any, TextIO

from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fshard.tracking.history import PARTS, WIDE, History, duration, line, number_text, value_text
from fshard.tracking.tracker import need

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


class Live:
    """Shows a run in the terminal: how far it is, the curve of its loss, its latest numbers, and where time goes.

    Without a terminal, as in a log file, it prints a line every ``seconds`` seconds, the first and the last record. A
    line leaves out what the time of a step consists of.
    The terminal is drawn anew once a second.

    Args:
        total: the step at which the run ends, for the bar and the time that is left.
        curve: the name of the number whose curve is shown.
        seconds: seconds between two lines where there is no terminal.
        file: where to write; the standard error by default.

    Raises:
        ImportError: rich is not installed, and there is a terminal: ``pip install "fshard[live]"``.

    Example::

        with fs.track([fs.trackers.Live(total=1000)], step) as track:
            for batch in batches:
                state, metrics = step(state, batch)
                track(state.step, metrics)
    """

    def __init__(
        self, total: int | None = None, *, curve: str = "loss", seconds: float = 10.0, file: TextIO | None = None
    ) -> None:
        self.total, self.curve, self.seconds = total, curve, seconds
        self.file = sys.stderr if file is None else file
        self.terminal = self.file.isatty()
        if self.terminal:
            need("fs.trackers.Live", "rich", "rich", "live")
        self.history = History(curve)
        self._screen: Any = None
        self._drawn: float | None = None
        self._printed = -1

    def __repr__(self) -> str:
        return f"Live(total={self.total})"

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        """Open the view."""
        if self.terminal:
            from rich.console import Console
            from rich.live import Live as Screen

            console = Console(file=self.file)
            self._screen = Screen(console=console, auto_refresh=False, vertical_overflow="crop")
            self._screen.start()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Note the numbers of a step; show them if it is time."""
        now = perf_counter()
        self.history.add(now, step, scalars)
        if self._drawn is None or now - self._drawn >= (1.0 if self.terminal else self.seconds):
            self._drawn = now
            self._show()

    def close(self) -> None:
        """Show the last record, and leave it in the terminal."""
        if self.history.latest and self._printed != self.history.step:
            self._show()
        if self._screen is not None:
            self._screen.stop()

    def _show(self) -> None:
        self._printed = self.history.step
        if self._screen is not None:
            width = self._screen.console.width
            self._screen.update(screen(self.history, self.total, width), refresh=True)
        else:
            print(line(self.history, self.total), file=self.file, flush=True)
