"""Clocks: the time on a rank's device and on its links, op by op.

``Clock`` has one rank, and its times are numbers. ``Fleet`` has all ranks of a mesh, and its times are tensors of them;
the arithmetic is the same, except that transfers, the handshake and the consensus begin for all ranks that take part
when the last of them has come.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.schedule import schedule_refusals
from fshard.schedule.costs import COPIED, Costs, Noise
from fshard.schedule.ops import STEP_KINDS, UPDATED, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import Transfer, awaited, started
from fshard.sharding.mesh import Mesh

Time = Any
"""Seconds: a float, or a tensor with one for each rank."""


@dataclass
class Ticks:
    """Times that a clock has told: when the device comes to each op, begins and ends of ops, and sums."""

    issued: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    compute: float = 0.0
    sent: int = 0


class Clock:
    """The clock of one rank, whom all others resemble."""

    larger: Callable[[Time, Time], Time] = staticmethod(max)

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        every = ((group.name, transfer) for group in schedule.groups for transfer in group.transfers)
        self.transfers = {(move.kind, name): move for name, move in every if move.sent and move.row.link}
        self.now: Time = 0.0
        self.queues: dict[str, Time] = {}  # when a link has carried all that was issued
        self.copied: dict[str, Time] = {}  # when the copies of a direction are done
        self.under_way: dict[tuple[str, str, int], Time] = {}  # when a transfer arrives
        self.beside = any([op.kind == UPDATED for op in schedule])
        self.ticks = Ticks()

    def run(self) -> Ticks:
        """Tell the times of all ops."""
        for at, op in enumerate(self.schedule):
            self.tell(at, op)
        return self.ticks

    def tell(self, at: int, op: Op) -> None:
        """Run the next op, and write down its times."""
        self.ticks.issued.append(self.read(self.now))
        start, end = self._take(at, op)
        self.ticks.starts.append(self.read(start))
        self.ticks.ends.append(self.read(end))

    @property
    def over(self) -> Time:
        """The time at which the step is over, with what the host does around it."""
        return self.now + self.costs.host

    def read(self, time: Time) -> float:
        """A time as a number."""
        return float(time)

    def factor(self, op: Op) -> Time:
        """The factor by which an op is slower than its cost."""
        return 1.0

    def meet(self, time: Time, axes: str) -> Time:
        """The time at which the last of the ranks that take part has come."""
        return time

    def _take(self, at: int, op: Op) -> tuple[Time, Time]:
        """Run an op, and return its begin and its end: of one that starts a transfer, those of the transfer."""
        seconds, start = self.costs.of_op(op.kind, op.target), self.now
        if started(op.kind) is not None:
            return self._start(op, seconds)
        if op.kind == "update" and self.beside:  # on a stream of its own, one after the other
            begin = self.larger(start, self.queues.get(UPDATED, 0.0))
            self.queues[UPDATED] = self.under_way["update", op.target, 0] = begin + seconds * self.factor(op)
            return begin, self.queues[UPDATED]
        if op.kind == UPDATED:
            self.now = self.larger(self.now, self.under_way.pop(("update", op.target, 0)))
            return start, self.now
        row = awaited(op.kind)
        if row is not None:
            if (row.name, op.target, op.index) not in self.under_way:
                raise schedule_refusals.broken_lifetime(f"{row.name} of {op.target}", at, str(op), "none is in flight")
            self.now = self.larger(self.now, self.under_way.pop((row.name, op.target, op.index)))
        elif op.kind in STEP_KINDS:
            self.now = self.meet(self.now, "")
        self._work(op, seconds)
        return start, self.now

    def _start(self, op: Op, seconds: float) -> tuple[Time, Time]:
        """Start a transfer: its link carries it after all that was issued before."""
        self._work(op, seconds)
        copied = self._copied(op)
        transfer = self.transfers.get((op.kind, op.target))
        start, arrival = (self.now, copied) if transfer is None else self._carried(transfer, copied)
        self.under_way[op.kind, op.target, op.index] = arrival
        return start, arrival

    def _carried(self, transfer: Transfer, ready: Time) -> tuple[Time, Time]:
        """The times at which a transfer that is ready starts and arrives."""
        name, link = self.costs.carrier(transfer)
        free = self.queues.get(name, 0.0)
        start = self.larger(self.meet(ready, transfer.axes), free) + link.latency
        self.queues[name] = arrival = start + link.seconds(transfer.sent)
        self.ticks.busy[name] = self.ticks.busy.get(name, 0.0) + link.seconds(transfer.sent)
        self.ticks.sent += transfer.sent
        return start, arrival

    def _copied(self, op: Op) -> Time:
        """The time at which what an op sends has come from host memory, or has gone there: one copy a way at a time."""
        seconds = self.costs.copies.get((op.kind, op.target), 0.0)
        if not seconds:
            return self.now
        way = COPIED[op.kind]
        done = self.larger(self.now, self.copied.get(way, 0.0)) + seconds
        self.copied[way] = done
        return done

    def _work(self, op: Op, seconds: float) -> None:
        """Keep the device busy."""
        factor = self.factor(op)  # also for what takes no time: the draws of other ops do not depend on it
        if seconds:
            self.now = self.now + seconds * factor
            self.ticks.compute += self.read(seconds * factor)


class Fleet(Clock):
    """The clocks of all ranks of a mesh.

    Args:
        schedule: the schedule.
        costs: what ops cost.
        mesh: the ranks.
        noise: how they differ.
    """

    larger = staticmethod(lambda a, b: torch.maximum(_times(a), _times(b)))

    def __init__(self, schedule: Schedule, costs: Costs, mesh: Mesh, noise: Noise) -> None:
        super().__init__(schedule, costs)
        strange = [rank for rank in noise.slow if not 0 <= rank < mesh.size]
        if strange:
            raise schedule_refusals.bad_costs(
                [f"slow[{rank}]: the mesh has ranks 0 to {mesh.size - 1}" for rank in strange]
            )
        used = {name for group in schedule.groups for move in group.transfers for name in move.axes.split("+") if name}
        if lacking := sorted(used - {*mesh.axis_names}):
            raise schedule_refusals.other_mesh(lacking, mesh.axis_names)
        self.mesh, self.noise, self.rank = mesh, noise, 0
        self.generator = torch.Generator().manual_seed(noise.seed)
        self.ranks = self._spread(noise.ranks)
        for rank, factor in noise.slow.items():
            self.ranks[rank] *= factor
        self.now = torch.zeros(mesh.size, dtype=torch.float64, device="cpu")

    def ends(self) -> list[float]:
        """The times at which the ranks are over, with what the host does around the step."""
        made = Fleet(self.schedule, self.costs, self.mesh, self.noise)
        made.run(0)
        found: list[float] = made.over.tolist()
        return found

    def run(self, rank: int = 0) -> Ticks:
        """Tell the times of one rank."""
        self.rank = rank
        return super().run()

    def read(self, time: Time) -> float:
        """The time of the rank that is told of."""
        return float(time[self.rank]) if isinstance(time, Tensor) and time.dim() else float(time)

    def factor(self, op: Op) -> Time:
        """The factor by which an op is slower than its cost, on each rank."""
        return self.ranks * self._spread(self.noise.ops) if self.noise.ops else self.ranks

    def meet(self, time: Time, axes: str) -> Time:
        """The times of the last of those that share all coordinates but those of these axes."""
        names = axes.split("+") if axes else self.mesh.axis_names
        dims = [number for number, name in enumerate(self.mesh.axis_names) if name in names]
        cut = time.reshape(self.mesh.sizes)
        return cut.amax(dims, keepdim=True).expand_as(cut).reshape(-1) if dims else time

    def _spread(self, sigma: float) -> Tensor:
        if not sigma:
            return torch.ones(self.mesh.size, dtype=torch.float64, device="cpu")
        drawn = torch.randn(self.mesh.size, generator=self.generator, dtype=torch.float64, device="cpu")
        return torch.exp(sigma * drawn.abs())


def _times(time: Time) -> Tensor:
    return torch.as_tensor(time, dtype=torch.float64, device="cpu")
