"""The footprint of a step: all that it holds beside its state, op by op, activations included."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fshard import markup
from fshard.arguments import size_text
from fshard.schedule.activation_moves import FETCH, OFFLOAD
from fshard.schedule.ops import COMPUTE_KINDS, ROOT, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.schedule_memory import ScheduleMemory
from fshard.schedule.step_program import Pass
from fshard.schedule.transfers import awaited, started


@dataclass(frozen=True)
class Need:
    """Needs of one compute op: bytes of activations at most until the next begins, bytes left then, operations.

    ``peak`` includes activations that were there before, and gradients of leaves. ``flops`` are those of matrix
    products and their like; ``moved`` are the bytes that all other operators read and write: that is their time.
    ``copied`` are bytes that go between the device and the memory of its host.
    ``bare`` is the peak with unit graphs: without gradients of leaves that end with the op, which a graph writes to the
    flat gradient, and where what a unit's Python makes for itself ends with its last use, and not with its names.
    In a pipeline ``part`` tells parts of a microbatch apart that hold activations side by side, those of each stage:
    what a need says is that of its part alone. ``shared`` are the bytes of ``after`` that all microbatches of a part
    share: gradients of leaves outside of units, which wait on the leaves for the end of a microbatch.
    ``hosted`` are the bytes of activations that leave for the host after a forward, or come back for a backward. The
    peak and what is left tell of the device alone: of what leaves until its copy is over, and from then on, once it is
    under way back.
    """

    peak: int
    after: int
    flops: int
    moved: int = 0
    bare: int = field(default=0, compare=False)
    copied: int = 0
    part: int = field(default=0, compare=False)
    shared: int = field(default=0, compare=False)
    hosted: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Footprint:
    """The bytes that a step holds at its peak, beside parameter shards and optimizer state.

    The peak is at op number ``op``, which is ``where``. Gradients include their staging and their shards.
    ``host_bytes`` are those of activations in the memory of the host, at most; they are in no other number.
    ``graph_bytes`` are those that a captured step also holds between steps: its copy of the batch, which is in the
    peak, and the pool of its graph, as large as what the step makes at its peak.
    """

    peak_bytes: int
    op: int
    where: str
    arena_bytes: int
    gradient_bytes: int
    activation_bytes: int
    host_bytes: int = 0
    graph_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"at most {size_text(self.peak_bytes)} beside the state, at op {self.op}, {self.where}: arena "
            f"{size_text(self.arena_bytes)}, gradients {size_text(self.gradient_bytes)}, activations "
            f"{size_text(self.activation_bytes)}" + self._hosted
        )

    @property
    def _hosted(self) -> str:
        hosted = f"; activations on the host {size_text(self.host_bytes)}" if self.host_bytes else ""
        return hosted + (f"; a graph holds {size_text(self.graph_bytes)} of it" if self.graph_bytes else "")

    def _repr_html_(self) -> str:
        parts = [
            ("arena", self.arena_bytes),
            ("gradients", self.gradient_bytes),
            ("activations", self.activation_bytes),
        ]
        rows = [[name, size_text(size), markup.bar([(name, size)], self.peak_bytes)] for name, size in parts]
        title = f"at most {size_text(self.peak_bytes)} beside the state, at op {self.op}, {self.where}{self._hosted}"
        return markup.shown(title, markup.table(["", "bytes", ""], rows))


def footprint(schedule: Schedule, needs: Sequence[Need], graphs: bool = False, batch: int = 0) -> Footprint:
    """The peak of a step, given the needs of one microbatch's compute ops; every microbatch is taken to need the same.

    Where microbatches take turns, as in a pipeline, what parts of several hold adds up (``Need.part``).
    With several passes they are those of ``schedule.stages.computes``. One need alone is that of every compute op.
    A gradient that a compute op fills is part of its own need until it is over, and an item of memory after that. With
    ``graphs`` it is an item from the begin of the op, and the need has no gradients of leaves beside it, where no other
    call reads the group: else autograd adds up gradients of leaves there, too. Gradients that wait beside the flat one
    while others are added (``fill:``), and one that is flat at once (``shard:``), do so at the end of their op; what
    graphs write has none of the former. ``batch`` are the bytes of the batch, which a captured step copies.
    """
    memory, done = schedule.memory, 0
    order = schedule.stages.spread(range(len(schedule.stages.computes)))
    born, filled = (_begun(memory, kind, [g.name for g in schedule.groups], len(schedule)) for kind in ("grad", "fill"))
    flat = _begun(memory, "shard", [group.name for group in schedule.groups if not group.reduced], len(schedule))
    direct = _direct(schedule) if graphs else frozenset()
    best, under_way = (-1, 0, 0, 0), _UnderWay(any(each.order for each in schedule.stages.passes))
    for at, op in enumerate(schedule):
        held, beside = under_way.total, memory.beside[at]
        if op.kind in COMPUTE_KINDS:
            need, done = needs[order[done] % len(needs)], done + 1
            held, others = need.peak, under_way.beside(op, need)
            if graphs and op.kind == "forward" and op.target != ROOT:
                held = need.bare
            elif (op.microbatch, op.target) in direct:
                held = max(held, need.bare + born[at] + flat[at])
            else:
                held = max(held, need.after + filled[at] + flat[at])
            held += others
            under_way.take(op, need)
            beside -= born[at] + filled[at] + flat[at]
        best = max(best, (held + beside, -at, beside, held))
    total, at, beside, held = best
    where = str(schedule[-at]) if len(schedule) else "none"
    peak, hosted = memory.arena_bytes + max(total, 0), _hosted(schedule, needs)
    found = Footprint(peak, -at, where, memory.arena_bytes, beside, held, hosted)
    return _captured(schedule, found, total, batch) if schedule.policy.graph != "none" else found


def _captured(schedule: Schedule, found: Footprint, made: int, batch: int) -> Footprint:
    """With what a graph holds: the batch, and the pool of all that the step makes and has not from before."""
    memory, whole = schedule.memory, ((0, len(schedule) - 1),)
    kept = sum([memory.sizes[item] for item, spans in memory.lifetimes.items() if spans == whole])
    return replace(found, peak_bytes=found.peak_bytes + batch, graph_bytes=batch + max(made - kept, 0))


def _hosted(schedule: Schedule, needs: Sequence[Need]) -> int:
    """The most bytes of activations that the host holds: from the begin of their way there to the end of that back."""
    sizes: dict[tuple[int, str, str, int], int] = {}  # by pass, and by compute op
    at, numbers = 0, {id(each): number for number, each in enumerate(schedule.stages.passes)}
    for stage in schedule.stages.stages:
        computes = stage.program.computes if isinstance(stage, Pass) else ()
        for place, op in enumerate(computes, at):
            key = numbers[id(stage)], op.kind, op.target, op.index
            sizes[key] = needs[place % len(needs)].hosted
        at += max(len(computes), 1)
    held = most = 0
    for op in schedule:
        row = started(op.kind) or awaited(op.kind)
        if row is None or row.stage != "activation":
            continue
        number = numbers[id(schedule.stages.microbatches[op.microbatch])]
        if op.kind == OFFLOAD.name:
            held += sizes[number, "forward", op.target, op.index]
            most = max(most, held)
        elif op.kind == FETCH.wait:
            held -= sizes[number, "backward", op.target, op.index]
    return most


class _UnderWay:
    """The activations that are there between compute ops.

    Where microbatches run as a whole, the needs of each say all that there is. In a pipeline they take turns, and what
    parts of several microbatches hold adds up.
    """

    def __init__(self, in_turns: bool) -> None:
        self.in_turns = in_turns
        self.own: dict[tuple[int, int], int] = {}  # by microbatch and part
        self.made: dict[tuple[int, int], int] = {}  # the shared bytes that the need of a part contains
        self.shared: dict[int, int] = {}  # by part

    @property
    def total(self) -> int:
        """Bytes of all parts of all microbatches."""
        return sum(self.own.values()) + sum(self.shared.values())

    def beside(self, op: Op, need: Need) -> int:
        """Bytes beside those that the need of an op contains."""
        if not self.in_turns:
            return 0
        if _ends(op):
            return sum([size for (microbatch, _), size in self.own.items() if microbatch != op.microbatch])
        key = op.microbatch, need.part
        others = sum(self.own.values()) - self.own.get(key, 0) + sum(self.shared.values())
        return others - min(self.made.get(key, 0), self.shared.get(need.part, 0))

    def take(self, op: Op, need: Need) -> None:
        """An op is over."""
        key = (op.microbatch, need.part) if self.in_turns else (0, 0)
        if _ends(op) and self.in_turns:
            for each in [each for each in self.own if each[0] == op.microbatch]:
                del self.own[each]
            self.shared.clear()
            self.made.clear()
        else:
            self.made[key] = need.shared
            self.shared[need.part] = max(self.shared.get(need.part, 0), need.shared)
        self.own[key] = need.after - need.shared


def _ends(op: Op) -> bool:
    """Tell whether an op ends its microbatch."""
    return op.kind == "backward" and op.target == ROOT


def _direct(schedule: Schedule) -> frozenset[tuple[int, str]]:
    """The units, with their microbatch, whose gradients graphs write where they are flat: no other call reads them."""
    found = set[tuple[int, str]]()
    for number, each in enumerate(schedule.stages.microbatches):
        program = each.program
        readers = Counter(group for call in program.backward for group in program.reads[call.unit])
        readers.update(2 * program.reads[ROOT])
        found.update((number, unit) for unit, ids in program.reads.items() if all(readers[group] == 1 for group in ids))
    return frozenset(found)


def _begun(memory: ScheduleMemory, kind: str, groups: Sequence[str], ops: int) -> list[int]:
    """Bytes of the items of a kind, of some groups, that begin at each op."""
    begun = [0] * ops
    for item in [f"{kind}:{group}" for group in groups]:
        for first, _ in memory.lifetimes.get(item, ()):
            begun[first] += memory.sizes[item]
    return begun
