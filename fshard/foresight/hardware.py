"""What a step would run on: devices and links by names, and measured costs where there are some."""

import math
from dataclasses import dataclass, replace

from fshard.arguments import size_text
from fshard.errors import PlanError, lines
from fshard.foresight.packing import packing_seconds
from fshard.schedule.auto import Candidate
from fshard.schedule.candidates import Task
from fshard.schedule.costs import Costs
from fshard.schedule.footprint import Need
from fshard.schedule.infos import between, communicators
from fshard.schedule.machines import COMMUNICATOR, Cluster, Speed, foreseen_costs, named_device, named_link, speed
from fshard.schedule.ops import ROOT
from fshard.schedule.transfers import moves
from fshard.sharding.kinds import Kinds
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan

THREAD = 10e9
"""Bytes a second that one thread reads and writes in an update: AdamW of 128 MiB took 11 to 16 GB/s of one of an AMD
EPYC, and 4 while its memory was touched for the first time."""

THREAD_FLOPS = 5e10
"""Operations a second of one thread in products in float32, an order of magnitude: few rules have any."""


@dataclass(frozen=True)
class Hardware:
    """What a step would run on.

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

    >>> import fshard as fs
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

    def words_for(self, plan: Plan) -> str:
        """The names of these, and the dtype of products with a plan."""
        speed = self.speed_for(plan)
        words = self.words if self.whole is None else self.words + _products(speed is not self.whole)
        if all(group.kinds == Kinds() for group in plan.groups):
            return words
        to, there = size_text(int(speed.copies_per_s)), size_text(int(self.host.bytes_per_s))
        return f"{words}; {to} a second to a rank's host and from it, {there} a second in updates there"

    def of(self, task: Task, plan: Plan) -> Costs:
        """What ops cost on it, what packs and unpacks formats and what updates parameters included.

        Raises:
            PlanError: the costs are those of another program.
        """
        speed = self.speed_for(plan)
        links, packing = self.cluster.links(plan.mesh), packing_seconds(plan, task.stages, speed)
        copies = host_copies(plan, task, speed)
        if self.costs is None:
            units = foreseen_costs(task.stages, task.needs, speed, links)
            updated = {plan.groups[number].name for number in task.stages.updates if number < len(plan.groups)}
            for group in [group for group in plan.groups if group.name in updated & task.updates.keys()]:
                seconds = self._update_seconds(group, task.updates[group.name], speed)
                packing["update", group.name] = packing.get(("update", group.name), 0.0) + seconds
            return replace(units, seconds={**units.seconds, **packing}, copies=copies)
        check_costs(self.costs, task, self.costs_of)
        moved = {op: seconds for op, seconds in packing.items() if moves(op[0])}  # its updates were measured
        return self.costs.over(Costs(moved, links=links, processors=self.costs.processors, copies=copies))

    def _update_seconds(self, group: Group, need: Need, speed: Speed) -> float:
        """What an update takes where it runs. What is gathered from the host in a shorter dtype is cast there."""
        if not group.offloaded:
            return speed.seconds(need)
        cast = group.chunk * (group.dtype.itemsize + group.compute_dtype.itemsize)
        shorter = group.kinds.hosted and group.compute_dtype != group.dtype
        copied = need.copied / speed.copies_per_s
        return copied + self.host.seconds(replace(need, moved=need.moved + cast * shorter, copied=0))

    def held(self, plan: Plan, tried: Candidate, task: Task) -> int:
        """Bytes that a policy holds beside the state, communicators included."""
        return tried.memory.peak_bytes + self.joined(plan, tried.policy.secondary, task)

    def joined(self, plan: Plan, secondary: Axes, task: Task) -> int:
        """Bytes of communicators, with secondary shards over these axes."""
        return self.communicator * (len(communicators(plan, secondary, task.axes)) + len(between(task.groups)))


def host_copies(plan: Plan, task: Task, speed: Speed) -> dict[tuple[str, str], float]:
    """The seconds of copies between a device and the memory of its host beside compute, by the op that starts them."""
    found = {}
    read = {number for ids in task.stages.reads.values() for number in ids}
    for group in plan.groups:
        if group.id in read and group.kinds.hosted and group.travels:
            form = group.wires.get("all_gather")
            size = group.chunk * group.compute_dtype.itemsize if form is None else form.nbytes(group.chunk)
            found["all_gather", group.name] = size / speed.copies_per_s
        if group.id in task.stages.updates and group.offloaded and group.owned.chunk:
            found["offload", group.name] = group.owned.chunk * group.dtype.itemsize / speed.copies_per_s
    return found


def check_costs(costs: Costs, task: Task, name: str) -> None:
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
        remedy = "Calibrate a step of this model, step.calibrate(batch).save(FILE), or foresee without measured costs."
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
    host: float = THREAD,
) -> Hardware:
    """What a step would run on, by names.

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
        host: bytes a second that updates read and write in host memory, on one rank. The default is about what one
            thread does, and ``torchrun`` starts ranks with one.

    Raises:
        PlanError: an unknown name, a share that is none, or a rate that is not positive.

    >>> hardware("h100", inside="nvlink4").memory
    80000000000
    """
    found = named_device(device)
    if not 0 < products <= 1:
        raise PlanError(f"products={products} is no share of a peak: give a number up to 1")
    cluster = Cluster(named_link(link), named_link(inside) if inside else None, per_host, share)
    if not 0 < host < math.inf:
        raise PlanError(f"host={host}: give bytes a second, such as 10e9")
    words = (
        f"{device} at {products:.0%} of its peak in products; {link} between hosts, {inside or link} inside, "
        f"{per_host} ranks a host, {share:.0%} of the rates of links, {size_text(communicator)} a communicator"
    )
    limit = found.memory if memory is None else memory
    fast, whole = speed(found, short is not False, products), speed(found, False, products)
    words += "" if short is None else _products(short)
    there = Speed(THREAD_FLOPS, host, THREAD_FLOPS)
    made = Hardware(fast, cluster, limit, words, costs, communicator, host=there)
    return replace(made, whole=whole) if short is None else made


def _products(short: bool) -> str:
    """The dtype of products in words, as the last of those of a hardware."""
    return f"; products in {'bfloat16' if short else 'float32'}"
