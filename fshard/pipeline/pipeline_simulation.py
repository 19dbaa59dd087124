"""Simulating all positions of a pipeline together: when each op of each runs, and how long positions wait.

Each position has a device and links of its own, as one rank has in ``fshard.schedule.simulate``, and the ranks of a
position are alike. A message begins when it is sent and the link of its sender is free, and is there when it has
arrived and its receive was posted. Its sender never waits for its receiver. The handshake and the consensus begin when
all positions have come.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fshard import markup
from fshard.errors import ScheduleError
from fshard.schedule.clock import Clock
from fshard.schedule.costs import Costs
from fshard.schedule.ops import STEP_KINDS, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation, refuse_strange, time_text, told

Key = tuple[str, int]
"""An edge and a microbatch."""


@dataclass(frozen=True)
class PipelineSimulation:
    """Times at which the ops of all positions of a pipeline run. ``fs.sim.simulate(schedules, costs)`` makes it.

    Attributes:
        ranks: by position, the times of its ranks.

    >>> import torch, fshard as fs
    >>> params = {"layers": {n: {"w": torch.zeros(4, 4)} for n in "01"}}
    >>> layer, mesh = fs.unit(lambda p, x: torch.tanh(x @ p["w"])), fs.abstract_mesh((2, 1), ("stage", "data"))
    >>> def loss_fn(params, x):
    ...     return layer(params["layers"]["1"], layer(params["layers"]["0"], x)).sum()
    >>> stages, batch = fs.Stages("stage"), fs.P("data")
    >>> plan = fs.make_plan(params, mesh, [(".*", fs.P())], units=["layers.*"], batch=batch, stages=stages)
    >>> step = fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, accumulate=2)
    >>> seconds = {("forward", ""): 1.0, ("forward", "root"): 0.0, ("backward", ""): 2.0, ("backward", "root"): 0.0}
    >>> print(fs.sim.simulate(step.trace(torch.ones(4, 4)).schedules, fs.sim.Costs(seconds)))
    step 9.000 s: idle 33.3% on average
    position 0: compute 6.000 s; waits: receive 3.000 s
    position 1: compute 6.000 s; waits: consensus 2.000 s, receive 1.000 s
    """

    ranks: tuple[Simulation, ...] = field(repr=False)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return max(each.seconds for each in self.ranks)

    @property
    def compute(self) -> tuple[float, ...]:
        """By position, the seconds in which the device is busy."""
        return tuple(each.compute for each in self.ranks)

    @property
    def bubble(self) -> float:
        """The idle share of the devices, averaged over positions, between the first op of a step and its last."""
        span = self.seconds - self.ranks[0].host
        return 1 - sum(self.compute) / (span * len(self.ranks)) if span else 0.0

    @property
    def exposed(self) -> tuple[dict[str, float], ...]:
        """By position, the seconds in which the device waits, by the kind of what it waits for.

        ``receive`` are values and gradients of other stages, ``consensus`` is the end of the last position.
        """
        found = []
        for each in self.ranks:
            waits = dict[str, float]()
            for seconds, op in _waits(each):
                kind = op.kind.removeprefix("wait ")
                waits[kind] = waits.get(kind, 0.0) + seconds
            found.append(dict(sorted(waits.items(), key=lambda pair: -pair[1])))
        return tuple(found)

    def __str__(self) -> str:
        rows = [f"step {time_text(self.seconds)}: idle {self.bubble:.1%} on average"]
        for at, (each, waits) in enumerate(zip(self.ranks, self.exposed, strict=True)):
            why = ", ".join(f"{kind} {time_text(seconds)}" for kind, seconds in waits.items())
            rows.append(f"position {at}: compute {time_text(each.compute)}" + (f"; waits: {why}" if why else ""))
        return "\n".join(rows)

    def _repr_html_(self) -> str:
        rows = []
        for at, (each, waits) in enumerate(zip(self.ranks, self.exposed, strict=True)):
            parts = [("compute", each.compute), *waits.items()]
            why = ", ".join(f"{kind} {time_text(seconds)}" for kind, seconds in waits.items())
            rows.append([str(at), time_text(each.compute), why, markup.bar(parts, self.seconds)])
        title = f"a step of {time_text(self.seconds)}, idle {self.bubble:.1%} on average"
        return markup.shown(title, markup.table(["position", "compute", "waits", ""], rows))


def simulate_together(schedules: Sequence[Schedule], costs: Costs) -> PipelineSimulation:
    """Say when each op of the schedules of all positions begins and ends.

    Args:
        schedules: by position.
        costs: what ops cost; a link of the axis of stages alone is ``Costs(links={"stage": ...})``.

    Raises:
        PlanError: costs of an op that no schedule has, or that lack some forwards.
        ScheduleError: positions wait for each other, or for a message that none sends.
    """
    refuse_strange(schedules, costs)
    post = _Post([{op.target for op in schedule if op.kind == "stage_sum"} for schedule in schedules])
    clocks = [_PositionClock(schedule, costs, post, at) for at, schedule in enumerate(schedules)]
    moved = True
    while moved:
        moved = False
        for clock in clocks:
            while clock.ready():
                clock.tell(clock.at, clock.schedule[clock.at])
                clock.at += 1
                moved = True
    for number, clock in enumerate(clocks):
        if clock.at < len(clock.schedule):
            raise ScheduleError(f"'{clock.schedule[clock.at]}' at position {number} of the stage axis waits for good")
    return PipelineSimulation(tuple([told(clock.schedule, costs, clock.ticks) for clock in clocks]))


@dataclass
class _Post:
    """Facts that positions know of each other.

    Attributes:
        sums: by position, the groups whose gradients it adds to those of other positions.
        sent: begin and arrival of messages that were sent.
        parts: arrivals of the parts of sums, by group and position.
        come: when positions come to the handshake and the consensus, by the kind and the position.
    """

    sums: Sequence[set[str]]
    sent: dict[Key, tuple[float, float]] = field(default_factory=dict)
    parts: dict[tuple[str, int], float] = field(default_factory=dict)
    come: dict[tuple[str, int], float] = field(default_factory=dict)

    def whole(self, group: str) -> list[float | None]:
        """The arrival of each part of a sum; None for those that are not sent yet."""
        return [self.parts.get((group, at)) for at, groups in enumerate(self.sums) if group in groups]

    def met(self, kind: str) -> list[float | None]:
        """The times at which positions come to an op that all make together; None for those that are yet to come."""
        return [self.come.get((kind, at)) for at in range(len(self.sums))]


class _PositionClock(Clock):
    """The clock of the ranks of one position."""

    def __init__(self, schedule: Schedule, costs: Costs, post: _Post, position: int) -> None:
        super().__init__(schedule, costs)
        self.post, self.position, self.at = post, position, 0
        self.posted: dict[Key, int] = {}  # the op that has posted a receive

    def ready(self) -> bool:
        """Tell whether the next op is there, and can run."""
        if self.at == len(self.schedule):
            return False
        op = self.schedule[self.at]
        if op.kind in STEP_KINDS:
            self.post.come.setdefault((op.kind, self.position), self.now)
            return None not in self.post.met(op.kind)
        if op.kind == "wait receive":
            return (op.target, op.microbatch) in self.post.sent
        return op.kind != "wait stage_sum" or None not in self.post.whole(op.target)

    def meet(self, time: float, axes: str) -> float:
        """The time at which the last position has come; ranks of one position are alike."""
        return time if axes else max([come for come in self.post.met(self._op.kind) if come is not None], default=time)

    @property
    def _op(self) -> Op:
        return self.schedule[self.at]

    def _take(self, at: int, op: Op) -> tuple[float, float]:
        """Run an op; messages go to other positions, and come from them."""
        if op.kind == "wait receive":
            self._arrive(op)
        elif op.kind == "wait send":  # an edge may have several messages under way
            self.under_way["send", op.target, 0] = self.post.sent[op.target, op.microbatch][1]
        elif op.kind == "wait stage_sum":
            self.under_way["stage_sum", op.target, 0] = max([part for part in self.post.whole(op.target) if part])
        start, end = super()._take(at, op)
        if op.kind == "send":
            self.post.sent[op.target, op.microbatch] = start, end
        elif op.kind == "stage_sum":
            self.post.parts[op.target, self.position] = end
        elif op.kind == "receive":
            self.posted[op.target, op.microbatch] = at
        return start, end

    def _arrive(self, op: Op) -> None:
        """A message arrives: its receive lasted from the first byte to the last."""
        start, arrival = self.post.sent[op.target, op.microbatch]
        at = self.posted.pop((op.target, op.microbatch))
        ready = max(self.ticks.ends[at], arrival)
        self.under_way["receive", op.target, 0] = ready
        self.ticks.starts[at], self.ticks.ends[at] = min(max(start, self.ticks.issued[at]), ready), ready


def _waits(simulation: Simulation) -> list[tuple[float, Op]]:
    """The ops that hold the device for a transfer or for other positions, longest first, and for how long."""
    found = list(simulation.waits())
    for op, begin, end in zip(simulation.schedule, simulation.issued, simulation.ends, strict=True):
        if op.kind in STEP_KINDS and end > begin:
            found.append((end - begin, op))
    return sorted(found, key=lambda pair: -pair[0])
