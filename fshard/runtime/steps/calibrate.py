"""What ops take on these ranks: from timed steps to costs that all ranks have alike."""

import math
import os
import platform
import socket
from collections.abc import Sequence

import torch

from fshard.errors import PlanError
from fshard.runtime.comm import exchange
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.facts import digest
from fshard.runtime.execution.timed import Stopwatch
from fshard.runtime.steps.streams import streams
from fshard.schedule.costs import Costs
from fshard.schedule.fit import OpTime, fit, times_of, typical
from fshard.schedule.schedule import Schedule


def op_times(watch: Stopwatch, count: int) -> list[OpTime]:
    """What the ops of a step took.

    Raises:
        PlanError: the step did not keep to its schedule.
    """
    if len(watch.begins) != count or len(watch.ends) != count:
        raise PlanError("a step that was measured did not keep to its schedule: there is nothing to go by")
    found = []
    for at in range(count):
        begin, end = watch.begins[at], watch.ends[at]
        after = watch.begins[at + 1][0] if at + 1 < count else end[0]
        wall, thread, process = (b - a for a, b in zip(begin, end, strict=True))
        found.append(OpTime(wall, thread, process, max(after - end[0], 0.0)))
    return found


def steps_in(comms: Communicators, span: float, seconds: float) -> int:
    """How many steps take so long, on the rank that takes longest for one. Collective, and the same on all ranks."""
    row = torch.tensor([seconds], dtype=torch.float64, device="cpu")
    slowest = exchange(comms.control, row).max() if comms.control.size > 1 else row
    return math.ceil(span / max(float(slowest), 1e-6))


def fitted(comms: Communicators, schedule: Schedule, steps: Sequence[Sequence[OpTime]], host: float) -> Costs:
    """The costs of some steps, equal on all ranks. Collective."""
    control, busy = comms.control, streams(comms, schedule)
    own = [(time.wall, time.thread, time.process, time.gap) for time in typical(steps)]
    here = digest(socket.gethostname()) % 2**52
    row = torch.tensor(
        [here, host, *(number for numbers in own for number in numbers)], dtype=torch.float64, device="cpu"
    )
    rows = exchange(control, row) if control.size > 1 else row[None]
    together = max(int((rows[:, 0] == host_).sum()) for host_ in rows[:, 0])
    ranks = [[*times_of(each[2:].reshape(-1, 4).tolist())] for each in rows]
    place = machine(control.size, together)
    return fit(schedule, ranks, float(rows[:, 1].mean()), processors() / together, place, busy)


def fitted_by_all(comms: Communicators, schedule: Schedule, steps: Sequence[Sequence[OpTime]]) -> Costs | None:
    """The costs of some steps; None on all ranks if one has none to go by. Collective."""
    has = exchange(comms.control, torch.tensor([float(bool(steps))], dtype=torch.float64, device="cpu"))
    return fitted(comms, schedule, steps, 0.0) if bool(has.all()) else None


def processors() -> int:
    """The processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(ranks: int, together: int) -> str:
    """What costs were measured on, in words."""
    threads = torch.get_num_threads()
    return (
        f"{platform.machine()} with {processors()} processors, {ranks} ranks, {together} on one host, {threads} "
        f"threads each, PyTorch {torch.__version__}"
    )
