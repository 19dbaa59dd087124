"""Simulating a schedule: when each op begins and ends, given what ops cost. Pure and deterministic.

The model has one device a rank, which runs forwards, backwards, updates and the code between passes in the order of the
schedule, and links beside it. A link carries one transfer after the other, in the order of issue, at its full rate.
The wait of a transfer holds the device until it has arrived; that time is *exposed*. No time gets longer when a cost
gets smaller.

Without noise all ranks are alike, and one is simulated. With it all of a mesh are: a transfer begins when the last of
the ranks that take part has come.

What it leaves out: transfers between steps take no time, links do not slow each other down, and what carries transfers
takes nothing from compute. So a host whose processors do both is foreseen too fast: time its steps.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, overload

from fshard import markup
from fshard.arguments import expect, size_text
from fshard.schedule import schedule_refusals
from fshard.schedule.clock import Clock, Fleet, Ticks
from fshard.schedule.costs import Costs, Noise
from fshard.schedule.ops import LOCAL, ROOT, STEP_KINDS, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import Transfer, awaited
from fshard.sharding.mesh import Mesh

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Simulation:
    """Times at which the ops of a schedule run. All times are seconds from the begin of the step.

    Attributes:
        schedule: what was simulated.
        issued: when the device comes to each op.
        starts: when each op begins; for one that begins a transfer, when its first byte goes.
        ends: when each op is over; for one that begins a transfer, when it has arrived.
        compute: the seconds in which the device is busy.
        wire: the seconds in which the busiest link is.
        sent: bytes that a rank sends; on average, where transfers are not in each step.
        host: the seconds of the step before its first op and after its last.
        rank: the rank that this is: the one that ends last.
        by_rank: when each rank ends; empty where all are alike.
        clock: the type of the device, if this was measured by the clock of its host; None for a simulation.

    >>> params = {"w": torch.empty(64, 64, device="meta")}
    >>> plan = fs.make_plan(params, fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> step = fs.make_train_step(lambda params, x: (x @ params["w"]).square().mean(), fs.optim.sgd(0.1), plan)
    >>> schedule = step.trace(torch.empty(8, 64, device="meta")).schedule
    >>> found = fs.sim.simulate(schedule, fs.sim.Costs({("forward", "root"): 1e-3}, fs.sim.Link(1e6)))
    >>> found.sent, f"{found.compute:.3f}", found.exposed > 0
    (16384, '0.001', True)
    """

    schedule: Schedule = field(repr=False)
    issued: tuple[float, ...] = field(repr=False)
    starts: tuple[float, ...] = field(repr=False)
    ends: tuple[float, ...] = field(repr=False)
    compute: float
    wire: float
    sent: int
    host: float = 0.0
    rank: int = 0
    by_rank: tuple[float, ...] = field(default=(), repr=False)
    clock: str | None = None

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.host + max(self.ends, default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits."""
        return self.seconds - self.host - self.compute

    @property
    def exposed_by_kind(self) -> dict[str, float]:
        """Seconds in which the device waits, by the kind of transfer that it waits for."""
        found: Counter[str] = Counter()
        for seconds, op in self.waits():
            found[op.kind.removeprefix("wait ")] += seconds  # type: ignore[assignment]
        return dict(found.most_common())

    @property
    def sent_by_axes(self) -> dict[str, int]:
        """Bytes that a rank sends, by the mesh axes that they go over."""
        moves, found = _travelling(self.schedule), Counter[str]()
        for op in self.schedule:
            move = moves.get((op.kind, op.target))
            if move is not None and move.row.link:
                found[move.axes] += move.sent
        found.update(between(self.schedule))
        return dict(found.most_common())

    def waits(self) -> list[tuple[float, Op]]:
        """The ops that hold the device for a transfer, longest first, and for how long."""
        held, arrived, travel = [], {}, _travelling(self.schedule)
        for op, start, end in zip(self.schedule, self.issued, self.ends, strict=True):
            arrived[op.kind, op.target], row = end, awaited(op.kind)
            if row is None or end <= start:
                continue
            moved = row.name, op.target
            if (row.link and moved in travel) or arrived[moved] > start:  # else it is a copy that is done
                held.append((end - start, op))
        return sorted(held, key=lambda pair: -pair[0])

    def __str__(self) -> str:
        rows = [
            f"step {time_text(self.seconds)}: compute {time_text(self.compute)}, wire {time_text(self.wire)} for "
            f"{size_text(self.sent)} sent, exposed {time_text(self.exposed)}"
        ]
        rows += [f"{time_text(seconds):>10}  {op}" for seconds, op in self.waits()[:5]]
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        parts = [("compute", self.compute), ("exposed", self.exposed)]
        rows = [[name, time_text(value), markup.bar([(name, value)], self.seconds)] for name, value in parts]
        rows.append(["wire", time_text(self.wire), markup.bar([("wire", self.wire)], self.seconds)])
        waits = [[str(op), time_text(value), markup.bar([("", value)], self.exposed)] for value, op in self.waits()]
        title = f"a step of {time_text(self.seconds)}, which sends {size_text(self.sent)}"
        folded = markup.fold(f"{len(waits)} waits for transfers", markup.table(["op", "waits", ""], waits))
        return markup.shown(title, markup.table(["", "seconds", ""], rows), folded if waits else "")


class Simulated(Protocol[T_co]):
    """Schedules of several ranks, which run together: they say themselves how they are simulated."""

    def simulate(self, costs: Costs) -> T_co:
        """Say when each op of all schedules begins and ends."""


@overload
def simulate(schedule: Schedule, costs: Costs, mesh: Mesh | None = None, noise: Noise | None = None) -> Simulation: ...
@overload
def simulate(schedule: Simulated[T], costs: Costs) -> T: ...
def simulate(schedule: Any, costs: Costs, mesh: Mesh | None = None, noise: Noise | None = None) -> Any:
    """Say when each op of a schedule begins and ends.

    Args:
        schedule: the schedule; or those of all positions of a pipeline, ``step.trace(batch).schedules``.
        costs: what its ops cost.
        mesh: the ranks, given with ``noise``: the mesh that the schedule was made for, of up to some ten thousand
            ranks. An abstract one will do. Bytes are the schedule's, so other sizes would be wrong.
        noise: how ranks differ. Without it they are alike, and one is simulated for all.

    Returns:
        The times of one rank; with noise, of the one that ends last. Of a pipeline a value with those of one rank of
        each position.

    Raises:
        PlanError: costs of an op that the schedule does not have, or that lack all of its forwards; noise for a
            pipeline.
        ScheduleError: something is waited for that was never issued.

    >>> from fshard.schedule import Call, GroupInfo, Program, Transfer, build
    >>> group = GroupInfo("layer", 200, 100, 0, False, (Transfer("all_gather", "state", "param", sent=100),))
    >>> program = Program((Call("layer"),), (), {"layer": (0,)})
    >>> schedule = build(program, [group], fs.Policy(), train=False)
    >>> costs = fs.sim.Costs({("forward", "layer"): 2.0}, fs.sim.Link(bytes_per_s=100.0, latency=0.5))
    >>> print(fs.sim.simulate(schedule, costs))
    step 3.500 s: compute 2.000 s, wire 1.000 s for 100 B sent, exposed 1.500 s
       1.500 s  wait all_gather layer
    """
    together = not isinstance(schedule, Schedule) and hasattr(schedule, "simulate")
    wants = [
        ("schedule", schedule, object if together else Schedule, "step.schedule, or step.trace(batch).schedule"),
        ("costs", costs, Costs, "fs.sim.Costs(...)"),
        ("mesh", mesh, (Mesh, type(None)), "fs.abstract_mesh(...)"),
        ("noise", noise, (Noise, type(None)), "fs.sim.Noise(...)"),
    ]
    expect("simulate(schedule, costs)", wants)
    if together:
        if noise is not None:
            raise schedule_refusals.bad_costs(["noise is given, and the stages of a pipeline are simulated without it"])
        return schedule.simulate(costs)
    refuse_strange([schedule], costs)
    if noise is None:
        return told(schedule, costs, Clock(schedule, costs).run())
    if mesh is None:
        raise schedule_refusals.bad_costs(["noise is given, but no mesh: it says which ranks there are"])
    fleet = Fleet(schedule, costs, mesh, noise)
    ends = fleet.ends()
    rank = max(range(mesh.size), key=ends.__getitem__)
    return told(schedule, costs, fleet.run(rank), rank, tuple(ends))


def refuse_strange(schedules: Sequence[Schedule], costs: Costs) -> None:
    """Refuse costs of other ops than the schedules', and those that know some units and not others.

    Raises:
        PlanError: there are such costs.
    """
    known = {(op.kind, op.target) for schedule in schedules for op in schedule}
    problems = [
        f"{kind} {target}".rstrip() + ": no such op"
        for kind, target in [*costs.seconds, *costs.copies]
        if (kind, target) not in known and (target or kind == LOCAL)
    ]
    for kind in ("forward", "backward"):
        problems += _lacking(kind, {target for each, target in known if each == kind}, costs)
    if problems:
        raise schedule_refusals.bad_costs(problems)


def _lacking(kind: str, targets: set[str], costs: Costs) -> list[str]:
    """The units that costs lack, if they know others."""
    named = {target for each, target in costs.seconds if each == kind} - {ROOT}
    lacking = sorted(targets - named - {ROOT}) if named and "" not in named else []
    return [f"{kind} {target}: not in the costs" for target in lacking]


def _travelling(schedule: Schedule) -> dict[tuple[str, str], Transfer]:
    """The transfers that send something, by kind and group."""
    return {(move.kind, group.name): move for group in schedule.groups for move in group.transfers if move.sent}


def between(schedule: Schedule) -> Counter[str]:
    """The bytes that a rank sends between steps, on average over steps, by the mesh axes that they go over."""
    found: Counter[str] = Counter()
    for move in [move for group in schedule.groups for move in group.exchanges]:
        found[move.axes] += move.sent // move.every
    return found


def told(schedule: Schedule, costs: Costs, ticks: Ticks, rank: int = 0, by_rank: tuple[float, ...] = ()) -> Simulation:
    """The times of a clock as a simulation."""
    wire = max(ticks.busy.values(), default=0.0)
    times = tuple(ticks.issued), tuple(ticks.starts), tuple(ticks.ends)
    sent = ticks.sent + between(schedule).total()
    return Simulation(schedule, *times, ticks.compute, wire, sent, costs.host, rank, by_rank)


def measured(
    schedule: Schedule,
    times: Sequence[float],
    arrivals: Mapping[int, tuple[float, float]] | None = None,
    device: str = "cpu",
) -> Simulation:
    """Return what a step did, and when.

    Args:
        times: when each op began, in seconds, and when the last one was over.
        arrivals: begin and end of transfers, by the number of the op that issues them, where they are known. Else they
            are taken to last from their issue to the end of the op that waits for them.
        device: the type of the device, which may run behind the host whose clock gave the times.

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
        raise schedule_refusals.bad_costs([f"{len(times)} times for {len(schedule)} ops: give one more, the end"])
    issued = [time - times[0] for time in times]
    starts, ends = list(issued[:-1]), list(issued[1:])
    moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers if move.row.link}
    under_way: dict[tuple[str, str], int] = {}
    spans: dict[str, list[tuple[float, float]]] = {}
    held, total = 0.0, between(schedule).total()
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
    held += _meeting(schedule, times) if total or moves else 0.0
    wire = max(map(covered, spans.values()), default=0.0)
    spans_of = tuple(issued[:-1]), tuple(starts), tuple(ends)
    return Simulation(schedule, *spans_of, issued[-1] - held, wire, total, clock=device)


def _meeting(schedule: Schedule, times: Sequence[float]) -> float:
    """Seconds in which a rank met the others, at the begin and at the end of a step."""
    return sum([times[at + 1] - times[at] for at, op in enumerate(schedule) if op.kind in STEP_KINDS])


def time_text(seconds: float) -> str:
    """A time for people.

    >>> time_text(0.0123)
    '12.300 ms'
    """
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.3f} {unit}"


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
