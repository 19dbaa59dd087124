"""The times at which checkpoints are due, and the steps that stay on disk."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fshard.errors import PlanError

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of time."""


@dataclass(frozen=True)
class Retention:
    """The steps that stay on disk.

    Attributes:
        newest: the number of steps with the largest numbers; None for all.
        multiples: steps whose numbers are multiples of this stay besides; None for none.

    >>> Retention(2, 100).removable([98, 99, 100, 101, 102], 103)
    [98, 99, 101]
    """

    newest: int | None
    multiples: int | None = None

    def removable(self, steps: Sequence[int], written: int) -> list[int]:
        """The steps to remove once one was written, which stays."""
        if self.newest is None:
            return []
        others = [step for step in steps if step != written]
        old = others[: max(0, len(others) - (self.newest - 1))]
        return [step for step in old if self.multiples is None or step % self.multiples]


class Interval:
    """The time between two checkpoints, by the clock of this rank.

    Args:
        every: as ``seconds_between`` takes it.

    Attributes:
        seconds: the time; None where checkpoints are due by steps.
        since: the time of the last checkpoint, by ``time.monotonic``.
    """

    def __init__(self, every: Any) -> None:
        self.seconds, self.since = seconds_between(every), time.monotonic()

    def over(self) -> bool:
        """Tell whether the time has passed."""
        return self.seconds is not None and time.monotonic() - self.since >= self.seconds

    def restart(self) -> None:
        """Note that a checkpoint was saved."""
        self.since = time.monotonic()


def seconds_between(every: Any) -> float | None:
    """The seconds between two checkpoints, of a text such as ``"10min"``; None for a number of steps, or None.

    Raises:
        PlanError: it is neither.

    >>> seconds_between("1.5h"), seconds_between("90 s"), seconds_between(100)
    (5400.0, 90.0, None)
    """
    if isinstance(every, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h)", every)
        if found is None or not float(found[1]):
            raise PlanError(f"Checkpointer(every={every!r}): give a time such as '30s', '10min' or '1.5h', or steps")
        return float(found[1]) * UNITS[found[2]]
    check_steps("every", every, ", a time such as '10min'")
    return None


def check_steps(name: str, value: Any, also: str = "") -> None:
    """Refuse a value that is not a number of steps.

    Raises:
        PlanError: naming the argument.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PlanError(f"Checkpointer({name}={value!r}): give an int >= 1{also}, or None")
