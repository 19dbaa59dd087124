"""A view of a run in the terminal; where there is no terminal, a line now and then."""

import sys
from collections.abc import Mapping
from time import perf_counter
from typing import Any, TextIO

from fshard.tracking.history import History, line
from fshard.tracking.tracker import need


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
            from fshard.tracking.screen import screen

            width = self._screen.console.width
            self._screen.update(screen(self.history, self.total, width), refresh=True)
        else:
            print(line(self.history, self.total), file=self.file, flush=True)
