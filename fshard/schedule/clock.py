"""Clocks: the time on a rank's device, on its communicators and on its links, op by op.

``Clock`` has one rank, and its times are numbers. ``Fleet`` has all ranks of a mesh, and its times are tensors of them;
the arithmetic is the same, except that transfers, the handshake and the consensus begin for all ranks that take part
when the last of them has come.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from fshard.schedule import refusals
from fshard.schedule.costs import Costs, Noise
from fshard.schedule.link import Link
from fshard.schedule.ops import STEP_KINDS, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import Transfer, awaited, started
from fshard.schedule.wires import Passing, SharedWire, Time, as_number, covered
from fshard.sharding.mesh import Mesh

TICK = 4e-3
"""Seconds after which the kernel looks whether a thread has run long enough (at 250 Hz)."""

BEFORE = 3
"""Steps before the one that is told: by then, bursts are as in all later ones, and what ranks take from each other."""

Issue = tuple[Callable[[Time], Time], Time, int]
"""When a transfer arrives that is waited for from some time on; the work that was owed when it was issued, and by
which op that was."""


def turn(link: Link) -> float:
    """Seconds that threads which carry a transfer wait for a processor, where ranks share it and compute.

    Another thread may still run until the next tick, which may come at any time. A transfer is over when the last of
    its ranks has had its turn: the mean of the latest of so many times.

    >>> turn(Link(125e6, peers=1))
    0.0026666666666666666
    """
    ranks = link.peers + 1
    return TICK * ranks / (ranks + 1)


@dataclass
class Ticks:
    """Times that a clock has told: when the device comes to each op, begins and ends of ops, and sums."""

    issued: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    compute: float = 0.0
    beside: float = 0.0
    sent: int = 0
    host: float = 0.0


@dataclass
class Threads:
    """The work of threads that carry transfers: all that a step has owed them so far, and what of it is done."""

    owed: Time = 0.0
    done: Time = 0.0


class Clock:
    """The clock of one rank, whom all others resemble.

    Work of threads that carry transfers is owed in the order of issue. While the device computes, they get half of a
    processor that they share with it; while it waits, all of it. A transfer has arrived when its bytes have, and when
    its work is done.

    Where ranks share a processor, a transfer starts when its threads have their turn. All that a rank does takes longer
    by the part of a step in which the others have something to do: while they wait, it has the processor alone.
    """

    larger: Callable[[Time, Time], Time] = staticmethod(max)
    smaller: Callable[[Time, Time], Time] = staticmethod(min)

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule, self.costs = schedule, costs
        every = ((group.name, transfer) for group in schedule.groups for transfer in group.transfers)
        self.transfers = {(move.kind, name): move for name, move in every if move.sent and move.row.link}
        self.slow: Time = costs.slow
        self.now: Time = 0.0
        self.threads = Threads()
        self.worked: Time = 0.0
        self.wires: dict[str, SharedWire] = {}
        self.issued: list[tuple[int, SharedWire, Passing]] = []
        self.under_way: dict[tuple[str, str], Issue] = {}
        self.copied: dict[str, Time] = {}  # when the copies of a kind of op are done
        self.behind: Time = 0.0  # by how much the last rank comes later than this one, which is like the mean of all
        self.ticks = Ticks()

    def run(self) -> Ticks:
        """Tell the times of all ops, in a step that others like it have gone before: bursts may be spent."""
        bursts = any(self.costs.carrier(transfer)[1].burst for transfer in self.transfers.values())
        for _ in range(BEFORE if bursts or self.costs.slow > 1 else 0):
            self._all()
            over = self.over
            for wire in self.wires.values():
                wire.begin(over)
            self.slow = self._slower(over)
            self.now, self.threads, self.worked, self.ticks = 0.0 * self.now, Threads(), 0.0, Ticks()
            self.issued, self.under_way, self.copied, self.behind = [], {}, {}, 0.0
        return self._all()

    @property
    def over(self) -> Time:
        """Say when the step is over, with what the host does around it."""
        return self.now + self.costs.host * self.slow

    def _slower(self, over: Time) -> Time:
        """Return how many times longer all takes, by the part of the last step in which a rank had something to do."""
        working = self.worked + self.threads.owed + self.costs.host * self.slow
        part = self.smaller(working / self.larger(over, 1e-9), 1.0)
        return 1.0 + (self.costs.slow - 1.0) * part

    def _all(self) -> Ticks:
        ticks = self.ticks
        for at, op in enumerate(self.schedule):
            ticks.issued.append(self.read(self.now))
            start, end = self._take(at, op)
            ticks.starts.append(self.read(start))
            ticks.ends.append(self.read(end))
        for at, wire, passing in self.issued:
            arrival = wire.arrival(passing)
            ticks.starts[at], ticks.ends[at] = self.read(passing.start), self.read(arrival)
        for name, wire in self.wires.items():
            carried = (each for lane in wire.lanes.values() for each in lane)
            ticks.busy[name] = covered([(self.read(each.start), self.read(each.arrival)) for each in carried])
        ticks.host = self.read(self.costs.host * self.slow)
        return ticks

    def read(self, time: Time) -> float:
        """A time as a number."""
        return float(time)

    def factor(self, op: Op) -> Time:
        """Return how much slower than its cost an op is."""
        return self.slow

    def meet(self, time: Time, axes: str) -> Time:
        """Say when the last of the ranks that take part has come."""
        return time

    def _take(self, at: int, op: Op) -> tuple[Time, Time]:
        row = started(op.kind)
        seconds = self.costs.of(op.kind, op.target)
        if row is not None:
            transfer = self.transfers.get((op.kind, op.target))
            if transfer is None:
                self._work(op, seconds)
                begun, copied = self.now, self._copied(op)
                self.under_way[op.kind, op.target] = lambda now: copied, self.threads.owed, at
                return begun, copied
            else:
                self._start(at, op, transfer, seconds)
            return self.now, self.now
        start, row = self.now, awaited(op.kind)
        if row is not None:
            if (row.name, op.target) not in self.under_way:
                raise refusals.broken_lifetime(f"{row.name} of {op.target}", at, str(op), "none is in flight")
            arrival, owed, begun = self.under_way.pop((row.name, op.target))
            self._arrive(arrival, owed)
            transfer = self.transfers.get((row.name, op.target))
            if transfer is not None:
                link = self.costs.carrier(transfer)[1]
                seconds = max(seconds + transfer.sent * link.taking + (link.ahead if at > begun + 1 else 0.0), 0.0)
        elif op.kind in STEP_KINDS:
            self.now, self.behind = self.meet(self.now, "") + self.behind, 0.0
        self._work(op, seconds)
        return start, self.now

    def _start(self, at: int, op: Op, transfer: Transfer, seconds: float) -> None:
        """Start a transfer."""
        name, link = self.costs.carrier(transfer)
        self._work(op, seconds + transfer.sent * link.sending)
        copied = self._copied(op)
        wire = self.wires.setdefault(name, SharedWire(self.larger, self.smaller))
        come = self.meet(copied, transfer.axes) + self.behind
        late = turn(link) if self.costs.slow > 1 and link.bytes_per_s < math.inf else 0.0
        passing = wire.add(f"{transfer.kind}({transfer.axes})", link, transfer.sent, self.now, come, late)
        self.issued.append((at, wire, passing))
        self.threads.owed = self.threads.owed + link.work(transfer.sent) * self.slow * self.costs.shared
        self.under_way[op.kind, op.target] = partial(self._awaited, wire, passing), self.threads.owed, at
        self.ticks.sent += transfer.sent

    def _copied(self, op: Op) -> Time:
        """Say when what an op sends has come from host memory, or has gone there. Each way has one copy at a time."""
        seconds = self.costs.copies.get((op.kind, op.target), 0.0)
        if not seconds:
            return self.now
        done = self.larger(self.now, self.copied.get(op.kind, 0.0)) + seconds
        self.copied[op.kind] = done
        return done

    def _awaited(self, wire: SharedWire, passing: Passing, now: Time) -> Time:
        """Say when a transfer arrives that is waited for from now on.

        If the rank waits, the last one is behind it from then on, by a part of the transfer's time; else by as much as
        before.
        """
        arrival = wire.awaited(passing, now, self.wires.values())
        waits = as_number(arrival > now)
        self.behind = self.behind + waits * (passing.link.spread * (arrival - passing.start) - self.behind)
        return arrival

    def _arrive(self, arrival: Callable[[Time], Time], owed: Time) -> None:
        """Wait until a transfer has arrived, and the work that was owed at its start is done."""
        before = self.now
        self.now = self.larger(self.now, arrival(self.now))
        self.threads.done = self.smaller(self.threads.owed, self.threads.done + (self.now - before))
        rest = self.larger(owed - self.threads.done, 0.0 * self.now)
        self.now, self.threads.done = self.now + rest, self.threads.done + rest

    def _work(self, op: Op, seconds: float) -> None:
        """Keep the device busy."""
        factor = self.factor(op)  # also for what takes no time: the draws of other ops do not depend on it
        if not seconds:
            return
        busy = seconds * factor
        rest = self.threads.owed - self.threads.done
        taken = self.smaller(rest, busy) if self.costs.shared else 0.0 * busy
        self.now, self.worked = self.now + (busy + taken), self.worked + busy
        self.threads.done = self.threads.done + taken
        self.ticks.compute += self.read(busy)
        self.ticks.beside += self.read(taken)


class Fleet(Clock):
    """The clocks of all ranks of a mesh.

    Args:
        schedule: the schedule.
        costs: what ops cost.
        mesh: the ranks.
        noise: how they differ.
    """

    larger = staticmethod(lambda a, b: torch.maximum(_times(a), _times(b)))
    smaller = staticmethod(lambda a, b: torch.minimum(_times(a), _times(b)))

    def __init__(self, schedule: Schedule, costs: Costs, mesh: Mesh, noise: Noise) -> None:
        super().__init__(schedule, costs)
        strange = [rank for rank in noise.slow if not 0 <= rank < mesh.size]
        if strange:
            raise refusals.bad_costs([f"slow[{rank}]: the mesh has ranks 0 to {mesh.size - 1}" for rank in strange])
        used = {name for group in schedule.groups for move in group.transfers for name in move.axes.split("+") if name}
        if lacking := sorted(used - {*mesh.axis_names}):
            raise refusals.other_mesh(lacking, mesh.axis_names)
        self.mesh, self.noise, self.rank = mesh, noise, 0
        self.generator = torch.Generator().manual_seed(noise.seed)
        self.ranks = self._spread(noise.ranks)
        for rank, factor in noise.slow.items():
            self.ranks[rank] *= factor
        self.now = torch.zeros(mesh.size, dtype=torch.float64, device="cpu")

    def ends(self) -> list[float]:
        """Say when each rank is over, with what the host does around the step."""
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
        """Return how much slower than its cost an op is on each rank."""
        own = self.ranks * self.slow
        return own * self._spread(self.noise.ops) if self.noise.ops else own

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
