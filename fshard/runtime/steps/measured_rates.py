"""Choosing a policy by what this machine does in a second: one product of matrices, one all-gather.

That is rough, and alike on all ranks.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, fields, replace
from itertools import product

import torch

from fshard.runtime.comm import Communicator, exchange
from fshard.runtime.comm.communicator import SingleRank
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.engine.remat_rules import again
from fshard.runtime.memory import memory_space
from fshard.schedule import schedule_refusals
from fshard.schedule.auto import Auto, Choice, Rates, choose
from fshard.schedule.candidates import PolicyTask, units_again
from fshard.schedule.footprint import Need
from fshard.schedule.ops import Program
from fshard.sharding.plan import Plan

SHARD = 1 << 20
"""Elements that each rank sends: 4 MiB."""

TRIES = 4


COPIES = 20e9
"""Bytes a second between a device and its host where nobody has said: 80 % of 16 lanes of PCIe 4.0, about."""

Again = Callable[[tuple[str, ...], bool], Sequence[Need]]
"""The needs of a program with some units computed again, or offloaded; empty if that cannot be done."""


def ways(plan: Plan) -> tuple[bool, ...]:
    """Ways of units whose activations do not fit: computed again, and on a device (True) moved to the host.

    A rank whose device is the CPU has one memory, in which they would be twice.
    """
    return (False,) if plan.mesh.device.type == "cpu" else (False, True)


def remade(task: PolicyTask, units: tuple[str, ...], hosted: bool, needs: Sequence[Need]) -> PolicyTask:
    """The task with units computed again, or offloaded."""
    assert isinstance(task.program, Program)  # others have no such units
    program = replace(task.program, hosted=again(units, hosted).hosted(task.program))
    return replace(task, program=program, needs=needs, again=units, hosted=hosted)


def decided(plan: Plan, comms: Communicators, task: PolicyTask, auto: Auto, redo: Again | None = None) -> Choice:
    """The choice of all ranks together, by rates, with the needs of the neediest. Collective.

    Args:
        comms: its communicators, which are open.
        task: what is run.
        auto: what was asked for.
        redo: what units that are computed again or offloaded change; None if nothing may be.
    """
    rates, needs = common(comms, measured(plan, comms, auto), tuple(task.needs))

    def others() -> Iterator[PolicyTask]:
        if redo is None or not needs:
            return
        for units, hosted in product(units_again(task.program), ways(plan)):
            own = tuple(redo(units, hosted))
            able = len(own) == len(needs)
            most = common(comms, replace(rates, compute=float(able)), own if able else needs)
            if most[0].compute:  # on all ranks
                yield remade(task, units, hosted, most[1])

    return choose(replace(task, needs=needs), auto, rates, lambda: [*others()])


def foreseen(task: PolicyTask, auto: Auto, redo: Again | None = None, how: Sequence[bool] = (False,)) -> Choice:
    """Return what this rank alone would choose before any step, where activations may be what ``ways`` says.

    Raises:
        PlanError: it is not known what this machine does in a second.
    """
    rates = given_rates(auto)
    units = units_again(task.program) if redo is not None else []
    found = ((each, hosted, redo(each, hosted)) for each, hosted in product(units, how) if redo is not None)
    others = (remade(task, each, hosted, needs) for each, hosted, needs in found if needs)
    return choose(task, auto, rates, lambda: [*others])


def given_rates(auto: Auto) -> Rates:
    """The rates that a user gave.

    Raises:
        PlanError: one is missing, and it is not known what this machine does in a second.
    """
    missing = [name for name in ("compute", "wire") if getattr(auto, name) is None]
    if missing:
        raise schedule_refusals.unknown_rates(missing)
    return Rates(float(auto.compute or 0), float(auto.wire or 0), auto.latency, auto.copies or COPIES)


def measured(plan: Plan, comms: Communicators, auto: Auto) -> Rates:
    """This rank's rates: those that are given, and the others measured. Collective.

    The best of some tries counts: what else runs on a machine makes single tries slower, never faster.
    """
    gathers = [comm for (role, _), comm in comms.made.items() if role == "all_gather"]
    comm = max(gathers, key=lambda comm: comm.size, default=SingleRank())
    compute = auto.compute if auto.compute is not None else measured_peak(plan)
    wire = auto.wire if auto.wire is not None else _wire(plan, comm)
    copies = auto.copies if auto.copies is not None else _copies(plan, auto)
    return Rates(compute, wire, auto.latency, copies)


def common(comms: Communicators, rates: Rates, needs: tuple[Need, ...]) -> tuple[Rates, tuple[Need, ...]]:
    """The rates of the slowest rank, and the needs of the neediest: the same on all ranks. Collective."""
    flat = [number for need in needs for number in astuple(need)]
    row = torch.tensor([-rates.compute, -rates.wire, -rates.copies, *flat], dtype=torch.float64, device="cpu")
    most = exchange(comms.control, row).max(0).values.tolist()
    numbers = [int(number) for number in most[3:]]
    width = len(fields(Need))
    agreed = tuple(Need(*numbers[at : at + width]) for at in range(0, len(numbers), width))
    return Rates(-most[0], -most[1], rates.latency, -most[2]), agreed


def measured_peak(plan: Plan) -> float:
    """The floating-point operations a second of one product of matrices on this rank's device, in the plan's dtype.

    That is what a model can reach at most: the ``peak`` of ``metrics.mfu``. It takes a few milliseconds. Local.

    Args:
        plan: says the device, and the dtype in which most parameters are read.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.P())])
    >>> fs.sim.measured_peak(plan) > 1e6
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


def _copies(plan: Plan, auto: Auto) -> float:
    """Return the rate of copies to the host, where a limit on memory may ask for them."""
    device = plan.mesh.device
    if auto.memory is None or True not in ways(plan):
        return math.inf
    here, there = (
        torch.zeros(SHARD, device=device),
        memory_space("pinned_host", plan.mesh).empty(SHARD, torch.float32),
    )
    return here.nbytes / _best(lambda: there.copy_(here, non_blocking=True), device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(TRIES):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
