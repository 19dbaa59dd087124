"""The hardware of a step: devices and links by names, and measured costs where there are some."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fshard.arguments import expect, size_text
from fshard.errors import PlanError, lines
from fshard.foresight.packing_time import frozen_seconds, host_copies, packing_seconds, update_seconds
from fshard.schedule.auto import Candidate
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.costs import Costs, Link
from fshard.schedule.footprint import Need
from fshard.schedule.infos import between, communicators
from fshard.schedule.machines import (
    COMMUNICATOR,
    Cluster,
    Speed,
    foreseen_costs,
    hosted_seconds,
    named_device,
    named_link,
    speed,
)
from fshard.schedule.ops import ROOT
from fshard.schedule.step_program import StepProgram
from fshard.schedule.transfers import moves
from fshard.sharding.kinds import Kinds
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan

THREAD = 10e9
"""Bytes a second that one thread reads and writes in an update: AdamW of 128 MiB took 11 to 16 GB/s of one of an AMD
EPYC, and 4 while its memory was touched for the first time."""

THREAD_FLOPS = 5e10
"""Operations a second of one thread in products in float32, an order of magnitude: few rules have any."""


@dataclass(frozen=True)
class Hardware:
    """Devices and links that a step would run on.

    Attributes:
        speed: of one device. Where ``whole`` is given, that of products in bfloat16 or float16.
        cluster: the links.
        memory: bytes of a device; None for no limit.
        words: the names of these.
        costs: measured costs of the units, where there are some.
        communicator: bytes of a device that a communicator takes.
        costs_of: what the costs are called in errors: their file.
        whole: the speed of products in float32, where the dtype in which a plan computes says which; None where the
            first holds for all.
        host: the speed of a rank's processors, which update what is kept in host memory.

    >>> fs.sim.hardware("h100", link="ib400", inside="nvlink4").words.split(";")[0]
    'h100 at 70% of its peak in products'
    """

    speed: Speed
    cluster: Cluster
    memory: int | None = None
    words: str = ""
    costs: Costs | None = None
    communicator: int = 0
    costs_of: str = "the costs"
    whole: Speed | None = None
    host: Speed = Speed(math.inf, math.inf, math.inf)

    def speed_for(self, plan: Plan) -> Speed:
        """The speed of a device with a plan: by the dtype in which most of the parameters compute."""
        sizes: dict[bool, int] = {}
        for group in plan.groups:
            short = group.compute_dtype.itemsize <= 2
            sizes[short] = sizes.get(short, 0) + group.numel
        return self.whole if self.whole is not None and sizes.get(False, 0) > sizes.get(True, 0) else self.speed

    def words_for(self, plan: Plan, hosted: bool = False) -> str:
        """The names of these, the dtype of products with a plan, and the rates of host memory where it is used."""
        speed = self.speed_for(plan)
        words = self.words if self.whole is None else self.words + _products(speed is not self.whole)
        if not hosted and all(group.kinds == Kinds() for group in plan.groups):
            return words
        return f"{words}; {self.host_words(plan)}"

    def host_words(self, plan: Plan) -> str:
        """The rates of host memory. Measured costs have updates in them."""
        words = f"{size_text(int(self.speed_for(plan).copies_per_s))} a second to a rank's host and from it"
        there = f", {size_text(int(self.host.bytes_per_s))} a second in updates there"
        return words + (there if self.costs is None else "")

    def of(self, task: PolicyTask, plan: Plan) -> Costs:
        """Return what ops cost on it, what packs and unpacks formats and what updates parameters included.

        Raises:
            PlanError: the costs are those of another program.
        """
        if self.costs is None:
            return self.of_program(task.stages, task.needs, task.updates, plan, self.cluster.links(plan.mesh))
        check_costs(self.costs, task, self.costs_of)
        stages, speed = task.stages, self.speed_for(plan)
        moved = {op: each for op, each in packing_seconds(plan, stages, speed).items() if moves(op[0])}
        known = {**host_copies(plan, stages, speed), **hosted_seconds(stages, task.needs, speed.copies_per_s)}
        copies = {**known, **self.costs.copies}  # its updates were measured
        return self.costs.over(Costs(moved, links=self.cluster.links(plan.mesh), copies=copies))

    def of_program(
        self,
        program: StepProgram,
        needs: Sequence[Need],
        updates: Mapping[str, Need],
        plan: Plan,
        links: Mapping[str, Link],
    ) -> Costs:
        """Return what the ops of a program cost, where nothing was measured.

        Args:
            program: of the ranks of the plan.
            needs: those of its compute ops.
            updates: what the update of each group on the device needs, by the group's name.
            plan: what these ranks hold.
            links: between them, and to others, by mesh axes.
        """
        speed = self.speed_for(plan)
        units, seconds = foreseen_costs(program, needs, speed, links), packing_seconds(plan, program, speed)
        updated = {plan.groups[number].name for number in program.updates if number < len(plan.groups)}
        for group in [group for group in plan.groups if group.name in updated & updates.keys()]:
            took = update_seconds(group, updates[group.name], speed, self.host)
            seconds["update", group.name] = seconds.get(("update", group.name), 0.0) + took
        around, copies = frozen_seconds(plan, program, speed, self.host), host_copies(plan, program, speed)
        copies |= hosted_seconds(program, needs, speed.copies_per_s)
        return replace(units, seconds={**units.seconds, **seconds}, copies=copies, host=around)

    def held(self, plan: Plan, tried: Candidate, task: PolicyTask) -> int:
        """Bytes that a policy holds beside the state, communicators included."""
        return tried.memory.peak_bytes + self.joined(plan, tried.policy.secondary, task)

    def joined(self, plan: Plan, secondary: Axes, task: PolicyTask) -> int:
        """Bytes of communicators, with secondary shards over these axes."""
        return self.communicator * (len(communicators(plan, secondary, task.axes)) + len(between(task.groups)))


def check_costs(costs: Costs, task: PolicyTask, name: str) -> None:
    """Refuse costs of other units than a program has, and such as lack some: these would take no time.

    Raises:
        PlanError: they are.
    """
    passes = ("forward", "backward")
    calls = {(op.kind, op.target) for op in task.stages.computes if op.kind in passes}
    known = {op for op in costs.seconds if op[0] in passes}
    for_all = {kind for kind, target in known if not target}
    problems = [f"{kind} {unit}: the program has no such op" for kind, unit in sorted(known - calls) if unit]
    lacking = sorted((kind, unit) for kind, unit in calls - known if kind not in for_all)
    problems += [f"{kind} {unit}: not in the costs" for kind, unit in lacking if unit != ROOT or not known]
    if problems:
        head = f"{name} are not those of this program: {len(problems)} of its ops or theirs have no counterpart"
        remedy = "Measure steps of this model, fs.sim.Costs.of(step.measured).save(FILE), or foresee without costs."
        raise PlanError(lines(head, problems, remedy))


def hardware(
    device: str,
    link: str = "ib400",
    inside: str | None = None,
    per_host: int = 8,
    memory: int | None = None,
    products: float = 0.7,
    share: float = 0.85,
    short: bool | None = None,
    costs: Costs | None = None,
    communicator: int = COMMUNICATOR,
    host: float | None = None,
) -> Hardware:
    """Return what a step would run on, by names.

    Args:
        device: one of ``fs.sim.DEVICES``.
        link: between hosts: one of ``fs.sim.LINKS``, or ``"BYTES/S,LATENCY"``.
        inside: between ranks of one host; by default ``link``.
        per_host: ranks on a host.
        memory: bytes of a device; by default what that device has.
        products: the share of its peak that matrix products reach.
        share: the share of its rate that a link gives to collectives.
        short: whether products are in bfloat16 or float16, not in float32; by default as most of the parameters of a
            plan compute. Under ``torch.autocast``, which a plan does not know of, say True.
        costs: measured costs of the units.
        communicator: bytes of a device that each communicator takes. The default is what NCCL took on four A100
            (NVIDIA/nccl, issue 964); yours may take less.
        host: bytes a second that updates read and write in host memory, on one rank. The default is ``THREAD``, about
            what one thread does, and ``torchrun`` starts ranks with one. Measured costs have updates in them.

    Raises:
        PlanError: an unknown name, a share that is none, a rate that is not positive, or one beside measured costs.

    >>> fs.sim.hardware("h100", inside="nvlink4").memory
    80000000000
    """
    found = named_device(device)
    if not 0 < products <= 1:
        raise PlanError(f"products={products} is no share of a peak: give a number up to 1")
    cluster = Cluster(named_link(link), named_link(inside) if inside else None, per_host, share)
    expect("fs.sim.hardware(device)", [("host", host, (int, float, type(None)), "bytes a second, such as 10e9")])
    if host is not None and (costs is not None or not 0 < host < math.inf):
        what = "updates are in the measured costs: leave one out" if costs else "give bytes a second, such as 10e9"
        raise PlanError(f"host={host}: {what}")
    words = (
        f"{device} at {products:.0%} of its peak in products; {link} between hosts, {inside or link} inside, "
        f"{per_host} ranks a host, {share:.0%} of the rates of links, {size_text(communicator)} a communicator"
    )
    limit = found.memory if memory is None else memory
    fast, whole = speed(found, short is not False, products), speed(found, False, products)
    words += "" if short is None else _products(short)
    there = Speed(THREAD_FLOPS, host or THREAD, THREAD_FLOPS)
    made = Hardware(fast, cluster, limit, words, costs, communicator, host=there)
    return replace(made, whole=whole) if short is None else made


def _products(short: bool) -> str:
    """The dtype of products in words, as the last of those of a hardware."""
    return f"; products in {'bfloat16' if short else 'float32'}"
