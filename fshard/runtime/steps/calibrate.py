"""What ops take on these ranks: from timed steps to costs that all ranks have alike."""

import math
import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

import torch

from fshard.runtime.comm import Communicator, exchange, exchange_text
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.execution.timed import Reading, Stopwatch, readings
from fshard.runtime.steps.streams import streams
from fshard.schedule.costs import Costs
from fshard.schedule.fit import OpTime, Overlap, counted, fit, mean, times_of
from fshard.schedule.schedule import Schedule


def op_times(watches: Sequence[Stopwatch], count: int) -> list[list[OpTime]]:
    """Return what the ops of some steps took, less what clocks took; nothing of a step that left its schedule.

    Args:
        watches: one for each step.
        count: how many ops the schedule has.
    """
    within, after = readings()
    found: list[list[OpTime]] = []
    for watch in watches:
        found.append([])
        if len(watch.begins) != count or len(watch.ends) != count:
            continue
        for at in range(count):
            begin, end = watch.begins[at], watch.ends[at]
            following = watch.begins[at + 1] if at + 1 < count else end
            own, gap = _less(begin, end, within), _less(end, following, after)
            found[-1].append(OpTime(*own, *gap))
    return found


def _less(begin: Reading, end: Reading, read: Reading) -> list[float]:
    """The time between two readings of clocks, less what reading them takes."""
    return [max(b - a - c, 0.0) for a, b, c in zip(begin, end, read, strict=True)]


def steps_in(comms: Communicators, span: float, seconds: float) -> int:
    """Return how many steps take so long, on the rank that takes longest for one.

    Collective, and the same on all ranks.
    """
    row = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    return math.ceil(span / max(float(exchange(comms.control, row).max()), 1e-6))


@dataclass(frozen=True)
class TimedOps:
    """The schedule of some steps, and what the ops of each took on this rank."""

    schedule: Schedule
    watches: Sequence[Stopwatch]


def fitted(
    comms: Communicators,
    schedule: Schedule,
    steps: Sequence[Sequence[OpTime]],
    host: float,
    own_processors: float | None = None,
    beside: tuple[Schedule, Sequence[Sequence[OpTime]]] | None = None,
) -> Costs:
    """The costs of some steps, equal on all ranks. Collective.

    Args:
        comms: the communicators of the plan.
        schedule: that of the steps.
        steps: what the ops of each took on this rank.
        host: seconds of this rank's step around them.
        own_processors: those that a rank has; None for those that the ranks of this job may run on.
        beside: the schedule of steps whose transfers ran beside compute, and what the ops of each took on this rank.
    """
    control, busy = comms.control, streams(comms, schedule)
    ranks = _ranks(control, steps)
    hosts = exchange(control, torch.tensor([host], dtype=torch.float64, device="cpu"))
    places = [place_of(text) for text in exchange_text(control, place())]
    own_processors = own_processors or (processors(places) if comms.plan.mesh.device.type == "cpu" else ACCELERATED)
    overlap = Overlap(beside[0], _ranks(control, beside[1])) if beside else None
    return fit(schedule, ranks, float(hosts.mean()), own_processors, machine(places), busy, overlap)


def _ranks(control: Communicator, steps: Sequence[Sequence[OpTime]]) -> list[list[OpTime]]:
    """The means of the steps that count, on each rank. Collective."""
    totals = [sum(time.wall + time.gap for time in step) for step in steps]
    chosen = counted(exchange(control, torch.tensor(totals, dtype=torch.float64, device="cpu")).tolist())
    own = [astuple(time) for time in mean([steps[number] for number in chosen])]
    row = torch.tensor([number for numbers in own for number in numbers], dtype=torch.float64, device="cpu")
    return [[*times_of(each.reshape(-1, NUMBERS).tolist())] for each in exchange(control, row)]


def fitted_by_all(
    comms: Communicators,
    apart: TimedOps,
    host: float = 0.0,
    own_processors: float | None = None,
    beside: TimedOps | None = None,
) -> Costs | None:
    """The costs of some steps; None on all ranks if one of them has left the schedule on any rank. Collective."""
    every = [each for each in (apart, beside) if each is not None]
    steps = [op_times(each.watches, len(each.schedule)) for each in every]
    whole = all(map(all, steps))
    kept = exchange(comms.control, torch.tensor([float(whole)], dtype=torch.float64, device="cpu"))
    if not bool(kept.all()):
        return None
    overlapped = (beside.schedule, steps[1]) if beside else None
    return fitted(comms, apart.schedule, steps[0], host, own_processors, overlapped)


NUMBERS = len(fields(OpTime))
"""Of an op, as ranks exchange them."""

ACCELERATED = 2.0
"""The processors of a rank that computes on a device of its own: enough, since its compute takes none."""

Place = tuple[str, frozenset[int]]
"""The host of a rank, and the processors that it may run on."""


def place() -> str:
    """Say where this rank is, as text."""
    known = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return f"{sum(1 << number for number in known):x} {socket.gethostname()}"


def place_of(text: str) -> Place:
    """The same, read back.

    >>> place_of("5 node1")
    ('node1', frozenset({0, 2}))
    """
    mask, _, host = text.partition(" ")
    bits = bin(int(mask, 16))[:1:-1]
    return host, frozenset([number for number, bit in enumerate(bits) if bit == "1"])


def processors(places: Sequence[Place]) -> float:
    """The processors that a rank has, on average. Ranks that may run on the same ones share them.

    >>> processors([("node1", frozenset({0, 1}))] * 4), processors([("node1", frozenset({i})) for i in range(2)])
    (0.5, 1.0)
    """
    return len({(host, number) for host, numbers in places for number in numbers}) / len(places)


def machine(places: Sequence[Place]) -> str:
    """Return what costs were measured on, in words."""
    threads, hosts = torch.get_num_threads(), [host for host, _ in places]
    together, count = max(map(hosts.count, hosts)), round(processors(places) * len(places))
    return (
        f"{platform.machine()} with {count} processors, {len(places)} ranks, {together} on one host, {threads} "
        f"threads each, PyTorch {torch.__version__}"
    )
