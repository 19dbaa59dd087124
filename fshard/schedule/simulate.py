"""Simulating a schedule: when each op begins and ends, given what ops cost. Pure and deterministic.

The model has one device, which runs forwards, backwards, updates and the code between passes in the order of the
schedule, and communicators beside it: one for each kind of transfer over each set of mesh axes. A communicator
carries one transfer at a time, in the order of issue. Communicators over one link share it the same way: who asked
first is served first. The wait of a transfer holds the device until it has arrived; that time is *exposed*. Times are
sums and maxima of costs and nothing else, so that none of them gets longer when a cost gets smaller.

What it leaves out: transfers take nothing from compute (on gloo they take processor time), copies to and from host
memory take no time, and ranks are alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fshard import errors
from fshard.arguments import expect, size_text
from fshard.schedule.ops import COMPUTE_KINDS, STEP_KINDS, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import KINDS, Transfer, awaited, started

NOTHING: Mapping[tuple[str, str], float] = MappingProxyType({})


@dataclass(frozen=True)
class Link:
    """What carries transfers.

    Args:
        bytes_per_s: what a rank can send in a second.
        latency: seconds from the issue of a transfer to its first byte.

    Raises:
        PlanError: a rate that is not positive, or a negative latency.

    >>> Link(125e6, latency=50e-6)  # 1 Gbit/s
    Link(bytes_per_s=125000000.0, latency=5e-05)
    """

    bytes_per_s: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        expect("fs.sim.Link", [(name, value, (int, float), "a number") for name, value in vars(self).items()])
        problems = []
        if not self.bytes_per_s > 0:
            problems.append(f"bytes_per_s={self.bytes_per_s!r} is not positive")
        if not 0 <= self.latency < math.inf:
            problems.append(f"latency={self.latency!r} is not a number of seconds")
        if problems:
            raise errors.bad_costs(problems)


@dataclass(frozen=True)
class Costs:
    """What ops cost.

    Args:
        seconds: how long the device is busy with one op, by kind and target: ``("forward", "blocks.0")``. Kinds are
            forward, backward, local, update, handshake, consensus, and the waits that add up or unpack what has
            arrived, ``wait all_gather``, ``wait reduce_scatter`` and ``wait replica_reduce``; ops that it lacks take
            no time. ``("local", "")`` is what each code between passes takes.
        link: the link of all-gathers, and of everything else that has no link of its own.
        reduces: the link of reduce-scatters and of sums over replicas, if it is another than that of all-gathers.
        links: links by mesh axes, joined by ``+``: ``{"replica": Link(25e6)}``. All that goes over these axes, and
            over no others, takes that link.

    Raises:
        PlanError: a negative time, one of an op that takes none, or something else than a link.

    >>> Costs({("forward", "blocks.0"): 2e-3}, Link(125e6)).link
    Link(bytes_per_s=125000000.0, latency=0.0)
    """

    seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    link: Link = Link()
    reduces: Link | None = None
    links: Mapping[str, Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seconds = "a dict of seconds by op, such as {('forward', 'blocks.0'): 2e-3}"
        wants = [
            ("seconds", self.seconds, Mapping, seconds),
            ("links", self.links, Mapping, "a dict of fs.sim.Link by axes"),
        ]
        expect("fs.sim.Costs", wants)
        links = {"link": self.link, "reduces": self.reduces or self.link, **self.links}
        problems = [
            f"{name}={link!r} is not an fs.sim.Link" for name, link in links.items() if not isinstance(link, Link)
        ]
        known = timed()
        for (kind, target), value in self.seconds.items():
            if kind not in known:
                problems.append(f"{kind} {target}: only {', '.join(sorted(known))} take time on the device")
            elif not 0 <= value < math.inf:
                problems.append(f"{kind} {target} takes {value!r} seconds")
        if problems:
            raise errors.bad_costs(problems)


def timed() -> frozenset[str]:
    """The kinds of ops that may take time on the device."""
    return COMPUTE_KINDS | STEP_KINDS | {"update"} | {row.wait for row in KINDS.values() if row.adds}


@dataclass(frozen=True)
class Simulation:
    """When the ops of a schedule run. All times are seconds from the begin of the step.

    Attributes:
        schedule: what was simulated.
        issued: when the device comes to each op.
        starts: when each op begins; for one that begins a transfer, when its first byte goes.
        ends: when each op is over; for one that begins a transfer, when it has arrived.
        compute: the seconds in which the device is busy.
        wire: the seconds in which the busiest link is.
        sent: bytes that a rank sends.
    """

    schedule: Schedule = field(repr=False)
    issued: tuple[float, ...] = field(repr=False)
    starts: tuple[float, ...] = field(repr=False)
    ends: tuple[float, ...] = field(repr=False)
    compute: float
    wire: float
    sent: int

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return max(self.ends, default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits."""
        return self.seconds - self.compute

    def waits(self) -> list[tuple[float, Op]]:
        """The ops that hold the device for a transfer, longest first, and for how long."""
        held = []
        for op, start, end in zip(self.schedule, self.issued, self.ends, strict=True):
            row = awaited(op.kind)
            if row is not None and row.link and end > start:
                held.append((end - start, op))
        return sorted(held, key=lambda pair: -pair[0])

    def __str__(self) -> str:
        rows = [
            f"step {time_text(self.seconds)}: compute {time_text(self.compute)}, wire {time_text(self.wire)} for "
            f"{size_text(self.sent)} sent, exposed {time_text(self.exposed)}"
        ]
        rows += [f"{time_text(seconds):>10}  {op}" for seconds, op in self.waits()[:5]]
        return "\n".join(rows)


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """When each op of a schedule begins and ends.

    Args:
        schedule: the schedule.
        costs: what its ops cost.

    Raises:
        PlanError: costs of an op that the schedule does not have.
        ScheduleError: something is waited for that was never issued.

    >>> from fshard.schedule import Call, GroupInfo, Policy, Program, Transfer, build
    >>> group = GroupInfo("layer", 200, 100, 0, False, (Transfer("all_gather", "state", "param", sent=100),))
    >>> program = Program((Call("layer"),), (), {"layer": (0,)})
    >>> schedule = build(program, [group], Policy(), train=False)
    >>> print(simulate(schedule, Costs({("forward", "layer"): 2.0}, Link(bytes_per_s=100.0, latency=0.5))))
    step 3.500 s: compute 2.000 s, wire 1.000 s for 100 B sent, exposed 1.500 s
       1.500 s  wait all_gather layer
    """
    wants = [
        ("schedule", schedule, Schedule, "step.schedule, or step.trace(batch).schedule"),
        ("costs", costs, Costs, "fs.sim.Costs(...)"),
    ]
    expect("simulate(schedule, costs)", wants)
    known = {(op.kind, op.target) for op in schedule}
    strange = [f"{kind} {target}: no such op" for kind, target in costs.seconds if (kind, target) not in known]
    if strange:
        raise errors.bad_costs(strange)
    return _Clock(schedule, costs).run()


def measured(
    schedule: Schedule, times: Sequence[float], arrivals: Mapping[int, tuple[float, float]] | None = None
) -> Simulation:
    """What a step did, and when.

    Args:
        times: when each op began, in seconds, and when the last one was over.
        arrivals: begin and end of transfers, by the number of the op that issues them, where they are known. Else they
            are taken to last from their issue to the end of the op that waits for them.

    >>> from fshard.schedule import Call, GroupInfo, Policy, Program, Transfer, build
    >>> group = GroupInfo("layer", 200, 100, 0, False, (Transfer("all_gather", "state", "param", sent=100),))
    >>> schedule = build(Program((Call("layer"),), (), {"layer": (0,)}), [group], Policy(), train=False)
    >>> [op.kind for op in schedule]
    ['handshake', 'all_gather', 'forward', 'wait all_gather', 'forward', 'free', 'backward']
    >>> print(measured(schedule, [10, 10, 11, 12, 14, 15, 15, 15]))
    step 5.000 s: compute 3.000 s, wire 4.000 s for 100 B sent, exposed 2.000 s
       2.000 s  wait all_gather layer
    """
    if len(times) != len(schedule) + 1:
        raise errors.bad_costs([f"{len(times)} times for {len(schedule)} ops: give one more, the end"])
    issued = [time - times[0] for time in times]
    starts, ends = list(issued[:-1]), list(issued[1:])
    moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers if move.row.link}
    under_way: dict[tuple[str, str], int] = {}
    spans: dict[str, list[tuple[float, float]]] = {}
    held, total = 0.0, 0
    for at, op in enumerate(schedule):
        row = awaited(op.kind)
        if (op.kind, op.target) in moves:
            under_way[op.kind, op.target] = at
            total += moves[op.kind, op.target].sent
        elif row is not None and (row.name, op.target) in moves:
            held += ends[at] - starts[at]
            begun = under_way.pop((row.name, op.target))
            ends[begun] = ends[at]
            if arrivals and begun in arrivals:
                starts[begun], ends[begun] = (time - times[0] for time in arrivals[begun])
            spans.setdefault(moves[row.name, op.target].axes, []).append((starts[begun], ends[begun]))
    wire = max(map(covered, spans.values()), default=0.0)
    return Simulation(schedule, tuple(issued[:-1]), tuple(starts), tuple(ends), issued[-1] - held, wire, total)


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one of these spans is under way.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def time_text(seconds: float) -> str:
    """A time for people.

    >>> time_text(0.0123)
    '12.300 ms'
    """
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.3f} {unit}"


class _Clock:
    """The time on the device, on each communicator and on each link."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        every = ((group.name, transfer) for group in schedule.groups for transfer in group.transfers)
        self.transfers = {(move.kind, name): move for name, move in every if move.sent and move.row.link}
        self.now = self.compute = 0.0
        self.comms: dict[str, float] = {}
        self.links: dict[str, float] = {}
        self.busy: dict[str, float] = {}
        self.sent = 0
        self.arrival: dict[tuple[str, str], float] = {}

    def run(self) -> Simulation:
        issued, starts, ends = [], [], []
        for at, op in enumerate(self.schedule):
            issued.append(self.now)
            start, end = self._take(at, op)
            starts.append(start)
            ends.append(end)
        wire = max(self.busy.values(), default=0.0)
        return Simulation(self.schedule, tuple(issued), tuple(starts), tuple(ends), self.compute, wire, self.sent)

    def _take(self, at: int, op: Op) -> tuple[float, float]:
        row = started(op.kind)
        if row is not None:
            transfer = self.transfers.get((op.kind, op.target))
            span = self._carry(transfer) if transfer is not None else (self.now, self.now)
            self.arrival[op.kind, op.target] = span[1]
            return span
        start, row = self.now, awaited(op.kind)
        if row is not None:
            if (row.name, op.target) not in self.arrival:
                raise errors.broken_lifetime(f"{row.name} of {op.target}", at, str(op), "none is in flight")
            self.now = max(self.now, self.arrival.pop((row.name, op.target)))
        seconds = self.costs.seconds.get((op.kind, op.target), 0.0)
        self.now += seconds
        self.compute += seconds
        return start, self.now

    def _carry(self, transfer: Transfer) -> tuple[float, float]:
        """Begin and end of a transfer that is started now."""
        comm = f"{transfer.kind}({transfer.axes})"
        name, link = "link", self.costs.link
        if transfer.axes in self.costs.links:
            name, link = transfer.axes, self.costs.links[transfer.axes]
        elif transfer.row.link == "reduces" and self.costs.reduces is not None:
            name, link = "reduces", self.costs.reduces
        seconds = transfer.sent / link.bytes_per_s
        start = max(self.now, self.comms.get(comm, 0.0)) + link.latency
        start = max(start, self.links.get(name, 0.0))
        self.comms[comm] = self.links[name] = start + seconds
        self.busy[name] = self.busy.get(name, 0.0) + seconds
        self.sent += transfer.sent
        return start, start + seconds
