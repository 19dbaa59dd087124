"""Choosing a policy by what this machine does in a second: one product of matrices, one all-gather.

That is rough, and alike on all ranks.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields, replace

import torch

from fshard.runtime.comm import Communicator, exchange
from fshard.runtime.comm.communicator import SingleRank
from fshard.runtime.comm.communicators import Communicators
from fshard.schedule import schedule_refusals
from fshard.schedule.auto import Auto, Choice, Rates, choose
from fshard.schedule.candidates import PolicyTask, units_again
from fshard.schedule.footprint import Need
from fshard.sharding.plan import Plan

SHARD = 1 << 20
"""Elements that each rank sends: 4 MiB."""

TRIES = 4


Again = Callable[[tuple[str, ...]], Sequence[Need]]
"""The needs of a program with some units computed again; empty if a unit cannot be computed again."""


def decided(plan: Plan, comms: Communicators, task: PolicyTask, auto: Auto, again: Again | None = None) -> Choice:
    """The choice of all ranks together, by rates, with the needs of the neediest. Collective.

    Args:
        plan: the plan.
        comms: its communicators, which are open.
        task: what is run.
        auto: what was asked for.
        again: what units that are computed again change; None if nothing may be.
    """
    rates, needs = common(comms, measured(plan, comms, auto), tuple(task.needs))

    def others() -> Iterator[PolicyTask]:
        if again is None or not needs:
            return
        for units in units_again(task.program):
            own = tuple(again(units))
            able = len(own) == len(needs)
            most = common(comms, replace(rates, compute=float(able)), own if able else needs)
            if most[0].compute:  # on all ranks
                yield replace(task, needs=most[1], again=units)

    return choose(replace(task, needs=needs), auto, rates, lambda: [*others()])


def foreseen(task: PolicyTask, auto: Auto, again: Again | None = None) -> Choice:
    """Return what this rank alone would choose before any step.

    Raises:
        PlanError: it is not known what this machine does in a second.
    """
    rates = given_rates(auto)
    units = units_again(task.program) if again is not None else []
    found = ((each, again(each)) for each in units if again is not None)
    others = (replace(task, needs=needs, again=each) for each, needs in found if needs)
    return choose(task, auto, rates, lambda: [*others])


def given_rates(auto: Auto) -> Rates:
    """The rates that a user gave.

    Raises:
        PlanError: one is missing, and it is not known what this machine does in a second.
    """
    missing = [name for name in ("compute", "wire") if getattr(auto, name) is None]
    if missing:
        raise schedule_refusals.unknown_rates(missing)
    return Rates(float(auto.compute or 0), float(auto.wire or 0), auto.latency)


def measured(plan: Plan, comms: Communicators, auto: Auto) -> Rates:
    """This rank's rates: those that are given, and the others measured. Collective.

    The best of some tries counts: what else runs on a machine makes single tries slower, never faster.
    """
    gathers = [comm for (role, _), comm in comms.made.items() if role == "all_gather"]
    comm = max(gathers, key=lambda comm: comm.size, default=SingleRank())
    compute = auto.compute if auto.compute is not None else measured_peak(plan)
    wire = auto.wire if auto.wire is not None else _wire(plan, comm)
    return Rates(compute, wire, auto.latency)


def common(comms: Communicators, rates: Rates, needs: tuple[Need, ...]) -> tuple[Rates, tuple[Need, ...]]:
    """The rates of the slowest rank, and the needs of the neediest: the same on all ranks. Collective."""
    flat = [number for need in needs for number in astuple(need)]
    row = torch.tensor([-rates.compute, -rates.wire, *flat], dtype=torch.float64, device="cpu")
    most = exchange(comms.control, row).max(0).values.tolist()
    numbers = [int(number) for number in most[2:]]
    width = len(fields(Need))
    agreed = tuple(Need(*numbers[at : at + width]) for at in range(0, len(numbers), width))
    return Rates(-most[0], -most[1], rates.latency), agreed


def measured_peak(plan: Plan) -> float:
    """The floating-point operations a second of one product of matrices on this rank's device, in the plan's dtype.

    That is what a model can reach at most: the ``peak`` of ``metrics.mfu``. It takes a few milliseconds. Local.

    Args:
        plan: says the device, and the dtype in which most parameters are read.

    >>> import fshard as fs
    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.P())])
    >>> measured_peak(plan) > 1e6
    True
    """
    device = plan.mesh.device
    size = 4096 if device.type == "cuda" else 512
    floating = [group for group in plan.groups if group.compute_dtype.is_floating_point]
    dtype = max(floating, key=lambda group: group.numel).compute_dtype if floating else torch.float32
    x = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(x)
    return float(2 * size**3 / _best(lambda: torch.mm(x, x, out=out), device))


def _wire(plan: Plan, comm: Communicator) -> float:
    if comm.size == 1:
        return math.inf
    device = plan.mesh.device
    shard = torch.zeros(SHARD, device=device)
    full = torch.empty(SHARD * comm.size, device=device)
    return (comm.size - 1) * shard.nbytes / _best(lambda: comm.all_gather(full, shard).wait(), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
