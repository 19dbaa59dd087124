"""``fs.track``: the numbers of a run go to its trackers, on rank 0 alone, without any communication."""

import math
import os
import resource
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from fshard.arguments import Want, described, expect
from fshard.errors import PlanError
from fshard.forks import own
from fshard.runtime.steps.measured_rates import measured_peak
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.tracking.tracker import Guard, Tracker, scalars

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


METHODS = ("begin", "log", "close")


class Track:
    """``track(step, metrics)``. Made by ``fs.track``; a context manager.

    Attributes:
        latest: the numbers of the latest record on rank 0, by name.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        mesh: Mesh,
        every: int,
        elements: float | None,
        peak: float | None,
        config: Mapping[str, Any],
        patience: float,
        window: ProfileWindow | None = None,
    ) -> None:
        self._window = window
        self.mesh, self.every, self.elements, self.peak = mesh, every, elements, peak
        self.config = config
        self.latest: Mapping[str, float] = {}
        self._guards = [Guard(tracker) for tracker in trackers] if mesh.rank == 0 else []
        self._begun = False
        self._before: float | None = None
        self._end = weakref.finalize(self, _close, self._guards, patience)  # also where nobody calls close
        own(self)

    def disown(self, why: str) -> None:
        """Record nothing in a child: files, connections and threads of trackers are the parent's."""
        self._end.detach()
        self._window = None

    def __repr__(self) -> str:
        return f"<track of {len(self._guards)} trackers on rank {self.mesh.rank}>"

    def __call__(self, step: int, metrics: Any, more: Any = None) -> None:
        """Record the metrics of a step. Local; ranks other than 0 do nothing.

        Args:
            step: the number of the step, such as ``state.step``.
            metrics: what the step returned, or any tree of scalars, such as ``{"val": {"loss": loss}}``; see
                ``fs.trackers.scalars``. Of a train step's metrics, those of every ``every``-th step are recorded.
            more: a tree of scalars for the same row, such as ``{"val": evaluate(state, batch)}``; it is recorded at
                every step.
        """
        if not self._end.alive:
            return
        if self._window is not None and hasattr(metrics, "ran"):
            self._window.after(step)
        if not self._guards:
            return
        ran = getattr(metrics, "ran", None)
        now, before = perf_counter(), self._before
        if ran is not None:
            self._before = now
            if step % self.every:
                metrics = ran = None
                if more is None:
                    return
        self.latest = found = {} if metrics is None else scalars(metrics)
        found |= {} if more is None else scalars(more)
        if ran is not None:
            found |= self._derived(metrics, None if before is None else now - before)
        if not self._begun:
            self._begun = True
            for guard in self._guards:
                guard.begin(step, self.config)
        for guard in self._guards:
            guard.log(step, found)

    def _derived(self, metrics: Any, passed: float | None) -> dict[str, float]:
        """Return the numbers of a train step's metrics, of a step that ended so many seconds after the one before."""
        told = {"elements_per_second": metrics.rate(self.elements), "memory": peak_memory(self.mesh.device)}
        told["mfu"] = None if self.peak is None else metrics.mfu(self.peak)
        told["outside"] = None if passed is None else max(0.0, passed - metrics.ran.seconds)
        return {name: value for name, value in told.items() if value is not None}

    def close(self) -> None:
        """End the runs of all trackers. Waits ``patience`` seconds at most for servers."""
        if self._window is not None:
            self._window.end()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close(guards: Sequence[Guard], patience: float) -> None:
    deadline = time.monotonic() + patience
    for guard in guards:
        guard.end()
    for guard in guards:
        guard.join(deadline)


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use so far: by tensors on an accelerator, by the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def track(
    trackers: Sequence[Tracker],
    of: Any,
    *,
    every: int = 1,
    elements: float | None = None,
    peak: float | str | None = None,
    config: Mapping[str, Any] | None = None,
    patience: float = 30.0,
    profile: tuple[Any, ...] | None = None,
) -> Track:
    """Make the function that records what steps tell: ``track(state.step, metrics)``, in a loop of your own.

    Trackers work on rank 0 alone and never communicate; other ranks make the same calls, which do nothing. A tracker
    that fails, or whose server is gone, gets no more records: one warning says so, and training goes on. Those that
    talk to a server do so on a thread of their own.

    Besides ``metrics.scalars()`` a record of a train step has ``memory`` (the most bytes in use so far: of tensors on a
    GPU, of the process on a CPU), ``outside`` (seconds between two steps: data, evaluation, checkpoints), and ``mfu``
    if ``peak`` is given.

    Args:
        trackers: those of ``fs.trackers``, or any object with their methods.
        of: the step whose metrics are recorded; or its plan, or the mesh.
        every: record each train step whose number is a multiple of this.
        elements: the elements of a global batch, such as its tokens, for ``elements_per_second`` where the loss is no
            ``fs.Mean``, which counts them.
        peak: the floating-point operations that one device can do in a second, for ``mfu``; ``"measured"`` measures a
            product of matrices.
        config: what the run was configured with; JSON values.
        patience: how many seconds to wait at the end for records that are still to be sent.
        profile: the first and the last train step to profile, such as ``(10, 13)``: each rank writes the trace of
            torch.profiler to ``profile/rank0.json``, or to another folder, ``(10, 13, "traces")``. Perfetto and
            ``chrome://tracing`` show it, with a range for each op of the schedule.

    Raises:
        PlanError: an invalid argument.

    >>> import tempfile
    >>> mesh = fs.make_mesh((1,), ("data",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with fs.track([fs.trackers.JsonLines(f"{folder}/run.jsonl")], mesh) as record:
    ...         record(1, {"loss": torch.tensor(0.5), "val": {"accuracy": 0.75}})
    ...     fs.trackers.read_lines(f"{folder}/run.jsonl")
    [{'step': 1, 'loss': 0.5, 'val/accuracy': 0.75}]
    """
    plan = of if isinstance(of, Plan | Mesh) else getattr(of, "plan", None)
    mesh = getattr(plan, "mesh", plan)
    wants: list[Want] = [
        ("trackers", trackers, (list, tuple), "a list, such as [fs.trackers.JsonLines('run.jsonl')]"),
        ("of", of, object if isinstance(mesh, Mesh) else Plan, "the step, or what fs.make_plan returned"),
        ("config", config, (Mapping, type(None)), "a dict of JSON values, or None"),
        ("patience", patience, (int, float), "seconds, such as 30.0"),
    ]
    expect("track(trackers, of)", wants)
    assert isinstance(mesh, Mesh)
    problems = [*_bad_trackers(trackers), *_bad_options(every, elements, peak, isinstance(plan, Plan))]
    problems += [] if profile is None else window_problems(profile)
    if problems:
        raise PlanError("; ".join(problems))
    window = None if profile is None else ProfileWindow(mesh, *profile)
    if peak == "measured" and isinstance(plan, Plan):
        peak = measured_peak(plan) if mesh.rank == 0 else None
    return Track(trackers, mesh, every, elements, None if peak is None else float(peak), config or {}, patience, window)


def _bad_trackers(trackers: Sequence[Any]) -> Iterator[str]:
    for i, one in enumerate(trackers):
        lacks = [f"{name}()" for name in METHODS if isinstance(one, type) or not callable(getattr(one, name, None))]
        if lacks:
            yield f"trackers[{i}] is {described(one)}, which lacks {', '.join(lacks)}: give one of fs.trackers"


def _bad_options(every: Any, elements: Any, peak: Any, planned: bool) -> Iterator[str]:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        yield f"every={every!r} must be an int >= 1"
    if elements is not None and not _positive(elements):
        yield f"elements={elements!r} must be a positive number, or None"
    if peak == "measured" and not planned:
        yield "peak='measured' needs the step or the plan, which know the dtype, and not the mesh alone"
    elif peak not in (None, "measured") and not _positive(peak):
        yield f"peak={peak!r} must be operations a second, 'measured', or None"


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
