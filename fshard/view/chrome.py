"""Runs as one file in the Trace Event Format, which Perfetto and Chrome's viewer open.

A process is a rank, or a prediction; a track is a lane: the device, and each kind of transfer over its axes, in as many
rows as are under way at once. Arrows lead from a transfer to its wait. Counters are the memory that a schedule holds.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.schedule.ops import COMPUTE_KINDS, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation
from fshard.schedule.transfers import awaited, item_words, started
from fshard.view.timeline import live
from fshard.writing import write_whole

DEVICE = 0
"""The track of the device."""

TRACKS = 1000
"""Numbers of tracks that a process has."""

Event = dict[str, Any]


@dataclass(frozen=True)
class OpSpan:
    """An op with its begin and end in seconds; without an end it was under way when the record ends."""

    number: int
    op: Op
    begin: float
    end: float | None


@dataclass(frozen=True)
class ScheduleRun:
    """One run of a schedule, or the part of it that is known.

    Attributes:
        device: when the device came to each op, and when it left it.
        carried: transfers by the number of the op that starts each; where one is missing, it lasts to its wait.
        step: the number of the step; -1 if it has none.
    """

    schedule: Schedule
    device: Sequence[OpSpan]
    carried: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    step: int = -1


def trace(path: str | os.PathLike[str], runs: "Simulation | Mapping[str, Simulation]") -> None:
    """Write simulations and measured steps to one trace file, complete or not at all.

    Open it in https://ui.perfetto.dev or chrome://tracing.

    Args:
        path: the file, such as ``"step.json"``.
        runs: what ``fs.sim.simulate`` returned or ``step.measured``, or a dict of these by name: each is a process.

    Raises:
        PlanError: something else than simulations, or the file cannot be written.

    >>> import tempfile
    >>> from fshard.schedule import Call, Program, build
    >>> schedule = build(Program((Call("layer"),), (), {"layer": ()}), [], fs.Policy(), train=False)
    >>> run = fs.sim.simulate(schedule, fs.sim.Costs({("forward", "layer"): 1e-3}))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fs.view.trace(f"{folder}/step.json", {"predicted": run})
    """
    wants = [
        ("path", path, (str, os.PathLike), "a file"),
        (
            "runs",
            runs,
            (Simulation, Mapping),
            "fs.sim.simulate(...), step.measured, or a dict of these by name",
        ),
    ]
    expect("trace(path, runs)", wants)
    named = {"step": runs} if isinstance(runs, Simulation) else dict(runs)
    strange = [name for name, run in named.items() if not isinstance(run, Simulation)]
    if strange:
        raise PlanError(f"trace(path, runs): {', '.join(map(repr, strange))}: give simulations, or step.measured")
    write(Path(path), {name: [of_simulation(run)] for name, run in named.items()})


def of_simulation(run: Simulation) -> ScheduleRun:
    """A simulation, or a measured step, as a run."""
    edges = [*run.issued, run.seconds - run.host]
    device, carried = [], {}
    for at, op in enumerate(run.schedule):
        device.append(OpSpan(at, op, edges[at], max(edges[at + 1], edges[at])))
        if started(op.kind):
            carried[at] = run.starts[at], run.ends[at]
    return ScheduleRun(run.schedule, device, carried)


def write(path: Path, processes: Mapping[str, Sequence[ScheduleRun]]) -> None:
    """Write runs by the name of their process."""
    events = [_numbered(e) for pid, (name, runs) in enumerate(processes.items()) for e in process(pid, name, runs)]
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _numbered(event: Event) -> Event:
    """The event with numbers as Perfetto wants them: that of a track belongs to one process alone, and none is 0."""
    pid = event["pid"] + 1
    return {**event, "pid": pid, "tid": TRACKS * pid + event["tid"]}


def process(pid: int, name: str, runs: Sequence[ScheduleRun]) -> Iterator[Event]:
    """All events of a process."""
    yield _meta(pid, 0, "process_name", name)
    yield _meta(pid, DEVICE, "thread_name", "device")
    tracks = _Tracks(pid)
    for run in runs:
        yield from _device(pid, run)
        yield from tracks.transfers(run)
        yield from _memory(pid, run)
    yield from tracks.names()


def _meta(pid: int, tid: int, kind: str, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "ts": 0, "name": kind, "args": {"name": name}}


def _device(pid: int, run: ScheduleRun) -> Iterator[Event]:
    if run.step >= 0 and run.device:
        begin = _us(run.device[0].begin)
        yield {"ph": "i", "s": "p", "pid": pid, "tid": DEVICE, "ts": begin, "name": f"step {run.step}"}
    for span in run.device:
        op = span.op
        what = "unit" if op.kind in COMPUTE_KINDS else "group"
        args = {"op": span.number, what: op.target, "microbatch": op.microbatch}
        event = {"pid": pid, "tid": DEVICE, "ts": _us(span.begin), "name": str(op), "cat": op.kind, "args": args}
        if span.end is None:
            yield {"ph": "B", **event}  # viewers show it as not finished
        else:
            yield {"ph": "X", "dur": _lasts(span.begin, span.end), **event}


@dataclass
class _Tracks:
    """The tracks of a process' transfers: rows of each lane, in which spans do not overlap."""

    pid: int
    rows: dict[tuple[str, int], int] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    arrows: int = 0

    def transfers(self, run: ScheduleRun) -> Iterator[Event]:
        """Slices and arrows."""
        moves = {(move.kind, group.name): move for group in run.schedule.groups for move in group.transfers}
        under_way: dict[tuple[str, str], OpSpan] = {}
        for span in run.device:
            row = awaited(span.op.kind)
            if started(span.op.kind):
                under_way[span.op.kind, span.op.target] = span
            elif row is not None:
                begun = under_way.pop((row.name, span.op.target), None)
                move = moves.get((row.name, span.op.target))
                if begun is not None and move is not None and move.sent:
                    yield from self._one(run, begun, span, move.axes, move.sent)
        for begun in under_way.values():
            tid = self._row(begun.op.kind, begun.begin, float("inf"))
            place: Event = {"pid": self.pid, "tid": tid, "cat": "transfer"}
            yield {"ph": "B", **place, "ts": _us(begun.begin), "name": str(begun.op)}

    def _one(self, run: ScheduleRun, begun: OpSpan, wait: OpSpan, axes: str, sent: int) -> Iterator[Event]:
        begin, end = run.carried.get(begun.number, (begun.begin, wait.end if wait.end is not None else wait.begin))
        tid = self._row(f"{begun.op.kind} over {axes}" if axes else begun.op.kind, begin, end)
        place: Event = {"pid": self.pid, "tid": tid, "cat": "transfer"}
        args = {"group": begun.op.target, "bytes": sent, "axes": axes}
        yield {"ph": "X", **place, "ts": _us(begin), "dur": _lasts(begin, end), "name": str(begun.op), "args": args}
        self.arrows += 1
        # A wait may begin before its transfer, whose link is busy: arrows that go back in time are not drawn.
        arrow = {"cat": "wait", "name": "wait", "id": self.pid * 10**7 + self.arrows}
        yield {"ph": "s", **arrow, "pid": self.pid, "tid": tid, "ts": _us(begin)}
        yield {"ph": "f", "bp": "e", **arrow, "pid": self.pid, "tid": DEVICE, "ts": max(_us(begin), _us(wait.begin))}

    def _row(self, lane: str, begin: float, end: float) -> int:
        ends = self.ends.setdefault(lane, [])
        row = next((number for number, over in enumerate(ends) if over <= begin + 1e-12), len(ends))
        ends[row:] = [end, *ends[row + 1 :]]
        return self.rows.setdefault((lane, row), len(self.rows) + 1)

    def names(self) -> Iterator[Event]:
        """Return what the tracks are called."""
        for (lane, row), tid in self.rows.items():
            yield _meta(self.pid, tid, "thread_name", lane if not row else f"{lane} ({row + 1})")


def _memory(pid: int, run: ScheduleRun) -> Iterator[Event]:
    """Return what a schedule holds, by kind, where it changes."""
    kinds, words, before = live(run.schedule), item_words(), None
    shown = [kind for kind, values in kinds.items() if any(values)]
    for span in run.device:
        held = {words[kind]: kinds[kind][span.number] for kind in shown}
        if held != before:
            yield {"ph": "C", "pid": pid, "tid": DEVICE, "ts": _us(span.begin), "name": "memory", "args": held}
            before = held


def _lasts(begin: float, end: float) -> float:
    """A duration that ends where the next event begins: Perfetto leaves out slices that overlap by a nanosecond."""
    return round(_us(end) - _us(begin), 3)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
