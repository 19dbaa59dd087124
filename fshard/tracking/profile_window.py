"""A window of steps under torch.profiler, whose trace Perfetto shows: the ops of the schedule are ranges in it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from fshard.sharding.mesh import Mesh

FOLDER = "profile"
"""The folder of traces, if none is given."""


class ProfileWindow:
    """Profiles some steps of a run on this rank, and writes the trace when the last of them is over.

    Args:
        mesh: the mesh, for its device and the number of this rank.
        first: the first step.
        last: the last one.
        folder: the folder of the file ``rank0.json``.
    """

    def __init__(self, mesh: Mesh, first: int, last: int, folder: str | os.PathLike[str] = FOLDER) -> None:
        self.mesh, self.first, self.last = mesh, first, last
        self.path = Path(folder) / f"rank{mesh.rank}.json"
        self._running: Any = None
        self._called = False
        if first <= 1:
            self._begin()

    def after(self, step: int) -> None:
        """Begin or end, after this step."""
        if not self._called:
            self._called = True
            if step > self.last and self._running is not None:  # a run that goes on after the window
                self._running.stop()
                self._running = None
        if self._running is not None and step >= self.last:
            self.end()
        elif self._running is None and self.first <= step + 1 <= self.last:
            self._begin()

    def end(self) -> None:
        """Write the trace, also of a run that is over before the last step of the window."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self.path))

    def _begin(self) -> None:
        cuda = [ProfilerActivity.CUDA] if self.mesh.device.type == "cuda" and torch.cuda.is_available() else []
        self._running = profile(activities=[ProfilerActivity.CPU, *cuda])
        self._running.start()


def window_problems(value: Any) -> Iterator[str]:
    """Say why ``profile=`` of ``fs.track`` is no window of steps."""
    numbers = value[:2] if isinstance(value, tuple) else ()
    counted = len(numbers) == 2 and all(type(number) is int for number in numbers)
    folder = isinstance(value, tuple) and len(value) <= 3 and all(isinstance(x, str | os.PathLike) for x in value[2:])
    if not (counted and folder and 1 <= numbers[0] <= numbers[1]):
        yield (
            f"profile={value!r} must be the first and the last step to profile, such as (10, 13), or with a folder "
            f"(10, 13, 'traces')"
        )
