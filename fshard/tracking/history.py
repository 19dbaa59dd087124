"""The history of a run for views, and its numbers and times for people."""

import math
from collections.abc import Mapping, Sequence

from fshard.arguments import size_text

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a cell: four rows of two."""


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """A curve of some values, the first at the left, as ``height`` lines of ``width`` characters.

    Values share columns of dots where they are more than there are columns: each is their mean. Those that are not
    finite are left out.

    >>> for line in curve([0, 1, 2, 3, 4, 5, 6, 7], 4, 2): print(line)
    ⠀⠀⡠⠊
    ⡠⠊⠀⠀
    """
    columns = binned(values, 2 * width)
    known = [value for value in columns if value is not None]
    cells = [[0x2800] * width for _ in range(height)]
    if known:
        low, high = min(known), max(known)
        rows = 4 * height - 1
        before: int | None = None
        for at, value in enumerate(columns):
            if value is None:
                before = None
                continue
            row = round((high - value) / (high - low) * rows) if high > low else rows // 2
            # Between neighbours a line goes down or up to half of the way, so that the curve has no holes.
            near = row if before is None else before + (row > before) - (row < before)
            for dot in range(min(row, near), max(row, near) + 1):
                cells[dot // 4][at // 2] |= DOTS[dot % 4][at % 2]
            before = row
    return ["".join(map(chr, line)) for line in cells]


def binned(values: Sequence[float], columns: int) -> list[float | None]:
    """The mean of the finite values in each column, or None without any. Few values take few columns."""
    count = min(columns, len(values))
    out: list[float | None] = []
    for at in range(count):
        part = values[at * len(values) // count : (at + 1) * len(values) // count]
        finite = [value for value in part if math.isfinite(value)]
        out.append(sum(finite) / len(finite) if finite else None)
    return out + [None] * (columns - count)


WIDE = 120
"""Columns from which on the curve and the numbers stand side by side."""

SHOWN = 4096
"""Values of a curve that are kept: when there are twice as many, every second one goes."""

PARTS = (("compute", "green"), ("exposed", "red"), ("outside", "yellow"))
"""Where the time between two steps goes: what a step does itself, waits for transfers, and all else."""


TERMINAL = frozenset(("skipped", "seconds", "busy_max", "busy_min", "busy_max_rank", "exposed", "outside", "flops"))
"""Numbers that a line of a log leaves out: its pace says most of them. All other trackers have them."""


class History:
    """A view's knowledge of a run: the latest numbers, and one curve.

    Attributes:
        step: the latest step.
        latest: the latest number of each name.
        values: of the curve.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.step = 0
        self.latest: dict[str, float] = {}
        self.values: list[float] = []
        self._stride, self._due = 1, 0
        self._first: tuple[float, int] | None = None
        self._now = 0.0

    def add(self, now: float, step: int, scalars: Mapping[str, float]) -> None:
        """Note the numbers of a step."""
        self._first = self._first or (now, step)
        self._now, self.step = now, step
        self.latest.update(scalars)
        if self.name in scalars:
            self._due -= 1
            if self._due <= 0:
                self.values.append(scalars[self.name])
                self._due = self._stride
            if len(self.values) >= 2 * SHOWN:
                self.values, self._stride = self.values[::2], 2 * self._stride

    @property
    def pace(self) -> float | None:
        """Steps a second since the first record; None before the second one."""
        if self._first is None or self.step <= self._first[1]:
            return None
        return (self.step - self._first[1]) / (self._now - self._first[0])

    def left(self, total: int | None) -> float | None:
        """Seconds to the last step; None where they are not known."""
        return (total - self.step) / self.pace if total and self.pace else None

    def parts(self) -> dict[str, float]:
        """Seconds by ``PARTS``, of the latest step; nothing before there was one."""
        if "seconds" not in self.latest:
            return {}
        exposed = self.latest.get("exposed", 0.0)
        parts = self.latest["seconds"] - exposed, exposed, self.latest.get("outside", 0.0)
        return {name: value for (name, _), value in zip(PARTS, parts, strict=True)}

    def drawn(self, width: int, height: int) -> list[str]:
        """The curve."""
        return curve(self.values, width, height)


def line(history: History, total: int | None) -> str:
    """The latest record as one line of a log.

    >>> history = History("loss")
    >>> history.add(0.0, 1, {"loss": 2.0}); history.add(2.0, 5, {"loss": 1.5, "seconds": 0.25, "memory": 2**30})
    >>> line(history, 9)
    'step 5/9, 2 steps/s, 2 s left: loss 1.5, memory 1.0 GiB'
    """
    head = [f"step {history.step}" + (f"/{total}" if total else "")]
    head += [f"{number_text(history.pace)} steps/s"] if history.pace else []
    left = history.left(total)
    head += [f"{duration(left)} left"] if left else []
    shown = {name: value for name, value in history.latest.items() if name not in TERMINAL or value is True}
    numbers = [f"{name} {value_text(name, value)}" for name, value in shown.items()]
    return f"{', '.join(head)}: {', '.join(numbers)}"


def value_text(name: str, value: float) -> str:
    """A number for people."""
    if name == "memory":
        return size_text(int(value))
    return f"{value:.1%}" if name == "mfu" else str(value) if isinstance(value, bool) else number_text(value)


def number_text(value: float | None) -> str:
    """A number with four digits.

    >>> number_text(0.00012345), number_text(1234567.0), number_text(12.0)
    ('0.0001234', '1.235M', '12')
    """
    if value is None or not math.isfinite(value):
        return str(value)
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time for people.

    >>> duration(42.4), duration(125), duration(7325)
    ('42 s', '2 min 05 s', '2 h 02 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
