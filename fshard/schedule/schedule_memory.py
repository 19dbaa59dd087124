"""Memory: what a step holds at each op beside its state, and where the arena keeps it, known before anything runs.

The arena holds one kind of item: ``param:g``, the gathered parameters of group g, from their all-gather to their free.
Each has one offset for all its lifetimes, so views of it can be made once (static slots). The other kinds come and go
beside it, so that they take memory in the backward, when activations no longer do. They follow from one rule for all
transfers: the target is there from the start, or, where it is *late*, from after the wait; the source ends with the
wait, or, where the transfer packs it, with the start; and what the transfer needs while it is under way is an item of
its kind's name, such as ``reduce_scatter:g``.

``second:g``, a rank's secondary shard, lives from a group's first reshard to its free. So ``grad:g``, the full flat
gradient, lives from the first backward op of a reader, or from its first transfer where no backward fills it, to the
end of that transfer. ``shard:g``, or ``own:g`` where a rank updates a part of it alone, waits for the update, which
with deferred updates is in the next step, or for its way to host memory. Until its first transfer a gradient is what
autograd made, a tensor a leaf; the flat one is filled then, so that for a moment there are two. That is ``leaf:g``,
less what the transfer itself begins. Where another backward fills the gradient before that, the flat one is filled in
that op: those that waited and the new ones are ``fill:g``. ``update:g`` is what comes out of host memory for an update
on the device, and what the update makes, from the first of the updates that run together with it to its own, or to the
wait for one beside compute, where the gradient ends, too.
``left:g`` is what rounding leaves out of a sum over replicas, and waits for the update as
the sum does. A gradient for which no update waits ends with the last code between passes that reads it, or with the
step where none does. The gradient of a group without transfers is its ``shard:g`` from the first backward op of a
reader on, and that op makes it beside those of leaves, which are ``fill:g`` there.

``copy:g`` is what a step that does not donate its state copies of it: before an update in the backward, or at the end.

One kind is kept from one step to the next, and so lives through all of each: ``cast:g``, the copy of a parameter shard
in the dtype that is gathered or read. With ``Policy(graph=)`` so does the gradient that waits for the update.

``exchange:g`` is a fragment between replicas that is under way during the step, or that leaves and arrives at its end:
those of the step that holds most of them. ``update:g`` of such a group is what its arrival needs.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from fshard.arguments import size_text
from fshard.schedule import schedule_refusals
from fshard.schedule.offsets import Span, pack, profile
from fshard.schedule.ops import LOCAL, ROOT, UPDATED, GroupInfo, Op
from fshard.schedule.step_program import Pass, StepProgram
from fshard.schedule.transfers import EDGE, HOST, SECOND, STATE, Transfer, awaited, started

ALIGN = 256
"""Bytes: items start at multiples of it, which suits vector loads and collectives on every device."""

TOGETHER = 1 << 16
"""Bytes that updates may take at once to run in one call of the optimizer: small ones cost more to call than to do."""


@dataclass(frozen=True)
class ScheduleMemory:
    """The memory of one schedule. All sizes are bytes, rounded up to ``ALIGN``.

    Attributes:
        arena_bytes: the size of the arena.
        lower_bound: the most bytes of arena items alive at once. With one offset for all lifetimes of an item, most
            arenas reach it, but not all.
        peak_bytes: the most that the arena and the items beside it take at once.
        offsets: the offset of each item of the arena.
        sizes: the size of each item.
        lifetimes: first and last op, both included, of each item's lifetimes.
        profile: bytes of items alive at each op.
        beside: those of them that are not in the arena.
    """

    arena_bytes: int
    lower_bound: int
    peak_bytes: int
    offsets: Mapping[str, int] = field(repr=False, hash=False)
    sizes: Mapping[str, int] = field(repr=False, hash=False)
    lifetimes: Mapping[str, tuple[Span, ...]] = field(repr=False, hash=False)
    profile: tuple[int, ...] = field(repr=False)
    beside: tuple[int, ...] = field(repr=False)

    def offset(self, item: str) -> int:
        """Say where an item, such as ``"param:blocks.3"``, starts in the arena."""
        return self.offsets[item]

    def peak(self, op: int) -> int:
        """Bytes that the arena, which is there all the time, and the items beside it take at op number ``op``."""
        return self.arena_bytes + self.beside[op]

    def __str__(self) -> str:
        held = [self.arena_bytes + other for other in self.beside]
        busiest = held.index(self.peak_bytes) if held else 0
        rows = [
            f"at most {size_text(self.peak_bytes)}, at op {busiest}; arena {size_text(self.arena_bytes)}, of which at "
            f"most {size_text(self.lower_bound)} are alive"
        ]
        width = max(map(len, self.sizes), default=0)
        order = sorted(self.sizes, key=lambda item: (self.offsets.get(item, math.inf), self.lifetimes[item]))
        for item in order:
            lives = ", ".join(f"{first}-{last}" for first, last in self.lifetimes[item])
            place = self.offsets.get(item, "beside")
            rows.append(f"{place:>14} {item:<{width}}  {size_text(self.sizes[item]):>10}  ops {lives}")
        return "\n".join(rows)


def plan_memory(
    ops: Sequence[Op], groups: Sequence[GroupInfo], stages: StepProgram, fixed: bool = False
) -> ScheduleMemory:
    """Lifetimes of everything that these ops hold, and offsets of what lies in the arena.

    Args:
        ops: the ops.
        groups: the groups.
        stages: what the step does.
        fixed: whether gradients that wait for updates keep their memory, as a graph of the step needs.
    """
    sizes: dict[str, int] = {}
    lifetimes: dict[str, list[Span]] = {}
    lives = _Lives(ops, groups, stages)
    for item, size, span in lives.run():
        sizes[item] = -(-size // ALIGN) * ALIGN
        lifetimes.setdefault(item, []).append(span)
    for item in lives.waiting_items & lifetimes.keys() if fixed else ():
        lifetimes[item] = [(0, len(ops) - 1)]
    spans = {item: tuple(found) for item, found in lifetimes.items()}
    inside = {item: size for item, size in sizes.items() if item.startswith("param:")}
    alive = profile(len(ops), [(size, spans[item]) for item, size in inside.items()])
    beside = profile(len(ops), [(size, spans[item]) for item, size in sizes.items() if item not in inside])
    bound = max(alive, default=0)
    offsets = dict(zip(inside, pack(list(inside.values()), [spans[item] for item in inside], bound), strict=True))
    arena = max((offsets[item] + size for item, size in inside.items()), default=0)
    return ScheduleMemory(
        arena_bytes=arena,
        lower_bound=bound,
        peak_bytes=arena + max(beside, default=0),
        offsets=offsets,
        sizes=sizes,
        lifetimes=spans,
        profile=tuple(map(add, alive, beside)),
        beside=tuple(beside),
    )


def update_runs(ops: Sequence[Op], groups: Sequence[GroupInfo]) -> list[range]:
    """Updates that follow each other and run together, at the first of them: the numbers of their ops.

    What they take is there at once, so updates that take more than ``TOGETHER`` run alone. So do those beside compute,
    each of which is waited for.
    """
    alone = any([op.kind == UPDATED for op in ops])
    sizes, runs, held = {group.name: group.update_bytes for group in groups}, list[range](), 0
    for at, op in enumerate(ops):
        if op.kind != "update":
            continue
        held += sizes[op.target]
        if runs and runs[-1].stop == at and held <= TOGETHER and not alone:
            runs[-1] = range(runs[-1].start, at + 1)
        else:
            runs.append(range(at, at + 1))
            held = sizes[op.target]
    return runs


Ended = Iterator[tuple[str, int, Span]]
"""Lifetimes that end: the item, its bytes and its span."""


class _Lives:
    """The items that are alive, and since when."""

    def __init__(self, ops: Sequence[Op], groups: Sequence[GroupInfo], stages: StepProgram) -> None:
        self.ops, self.groups, self.stages = ops, groups, stages
        self.by_name = {group.name: group for group in groups}
        self.paths = {
            group.name: group.at("gradient") if g in stages.fillings else () for g, group in enumerate(groups)
        }
        self.flat = _flat(groups, stages)
        self.unfilled = self._unfilled()
        filled = {id(each): self._filled(each) for each in stages.passes}
        self.filled = {number: filled[id(each)] for number, each in enumerate(stages.microbatches)}
        read = {groups[group].name: gradient for group, gradient in stages.updates.items()}
        self.reads = {name: groups[gradient] for name, gradient in read.items() if gradient is not None}
        self.waiting = Counter(group.name for group in self.reads.values())  # updates that read a gradient
        self.parted = {number: each.program.parted for number, each in enumerate(stages.microbatches)}
        self.last = {(op.microbatch, op.target): at for at, op in enumerate(ops) if self._fills(op)}
        self.born: dict[str, int] = {}
        self.fillings: Counter[str] = Counter()  # of the gradients that no reduction has taken yet
        self.rounds = Counter((op.kind, op.target) for op in ops if started(op.kind))

    def run(self) -> Ended:
        """Every lifetime."""
        for at, op in enumerate(self.ops):
            if self._fills(op):
                for group in self.filled.get(op.microbatch, {}).get(op.target, ()):
                    yield from self._fill(at, group)
                for name in self.unfilled.get(op.microbatch, ()) if op.target == ROOT else ():
                    self.born.setdefault(f"shard:{name}", at)  # it is zero from here on
            elif op.target in self.by_name:
                yield from self._take(at, op, self.by_name[op.target])
            elif op.kind == LOCAL:
                yield from self._local(at, op)
        yield from self._rest()
        yield from self._between()
        yield from self._kept_between()

    def _fills(self, op: Op) -> bool:
        """Tell whether an op fills gradients: those of leaves, not of inputs alone."""
        parted = self.parted.get(op.microbatch, False) and op.target != ROOT
        return op.kind == ("weight" if parted else "backward")

    def _filled(self, each: Pass) -> dict[str, list[GroupInfo]]:
        """The groups whose gradients the backward of each unit fills, and reduces."""
        gradients = each.gradients or {}
        return {
            unit: [
                group
                for group in [self.groups[gradients[i]] for i in ids if i in gradients]
                if self.paths[group.name] or group.name in self.flat
            ]
            for unit, ids in each.program.reads.items()
        }

    def _fill(self, at: int, group: GroupInfo) -> Ended:
        """A backward makes gradients of leaves, which wait if they are the first, and otherwise are added."""
        op = self.ops[at]
        if at < self.last[op.microbatch, op.target]:
            return  # autograd adds up what the calls of a unit make, and hands it over after the last
        if group.name in self.flat:
            if f"shard:{group.name}" not in self.born:
                self.born[f"shard:{group.name}"] = at
                yield f"fill:{group.name}", _leaves(group), (at, at)
            return
        self.born.setdefault(f"grad:{group.name}", at)
        self.fillings[group.name] += 1
        if self.fillings[group.name] == 2:
            yield f"fill:{group.name}", 2 * _leaves(group), (at, at)

    def _unfilled(self) -> dict[int, list[str]]:
        """Gradients without transfers that no backward fills, by the last microbatch of their pass."""
        found: dict[int, list[str]] = {}
        for number, filling in self.stages.fillings.items():
            name, (first, last) = self.groups[number].name, filling.program.filled(filling.read)
            if name in self.flat and first > last:
                found.setdefault(filling.last, []).append(name)
        return found

    def begin(self, item: str, at: int) -> None:
        """An item that must not be alive yet."""
        if item in self.born:
            raise schedule_refusals.broken_lifetime(
                item, at, str(self.ops[at]), f"it is alive since op {self.born[item]}"
            )
        self.born[item] = at

    def end(self, item: str, size: int, at: int) -> tuple[str, int, Span]:
        """An item that must be alive."""
        if item not in self.born:
            raise schedule_refusals.broken_lifetime(item, at, str(self.ops[at]), "no lifetime of it has begun")
        return item, size, (self.born.pop(item), at)

    def _take(self, at: int, op: Op, group: GroupInfo) -> Ended:
        """Return what ends with an op on a group."""
        row = started(op.kind) or awaited(op.kind)
        if row is not None:
            transfer = group.transfer(row.name)
            if transfer is not None:
                yield from (self._start if row.name == op.kind else self._wait)(at, group, transfer)
        elif op.kind in ("free", "reshard"):
            yield self.end(f"param:{group.name}", group.full_bytes, at)
            if op.kind == "reshard":
                self.born.setdefault(f"second:{group.name}", at)
            elif f"second:{group.name}" in self.born:
                yield self.end(f"second:{group.name}", group.second_bytes, at)
        elif op.kind in ("update", UPDATED) and at in self._together:
            yield from self._updated(at, group)

    def _updated(self, at: int, group: GroupInfo) -> Ended:
        gradient = self.reads.get(group.name)
        item = self._kept(gradient) if gradient else ""
        if gradient and item:  # deferred: the gradient is that of the step before
            self.waiting[gradient.name] -= 1
            parts = (item, "left") if gradient.left_bytes else (item,)
            for part in parts if not self.waiting[gradient.name] else ():
                name = f"{part}:{gradient.name}"
                yield name, gradient.size(part), (self.born.pop(name, 0), at)
        if group.update_bytes:
            yield f"update:{group.name}", group.update_bytes, (self._together[at], at)

    @functools.cached_property
    def _together(self) -> dict[int, int]:
        """The first of the updates that run together with each; or its own begin, by its wait."""
        begun = {op.target: at for at, op in enumerate(self.ops) if op.kind == "update"}
        waited = {at: begun.get(op.target, at) for at, op in enumerate(self.ops) if op.kind == UPDATED}
        return waited or {at: run.start for run in update_runs(self.ops, self.groups) for at in run}

    def _local(self, at: int, op: Op) -> Ended:
        """Gradients that nothing reads after this code between passes."""
        for freed in self.stages.freed[op.index : op.index + 1]:
            for group in [self.groups[g] for g in freed]:
                item = self._kept(group)
                if item:
                    yield self.end(f"{item}:{group.name}", group.size(item), at)

    def _start(self, at: int, group: GroupInfo, transfer: Transfer) -> Ended:
        if transfer.source == "grad":
            del self.fillings[group.name]
            if f"grad:{group.name}" in self.born:
                once = self.rounds[transfer.kind, group.name] == 1
                # What the gradient's being there twice adds to the peak. A shard is new in the first round alone.
                new = once and not transfer.late and transfer.target not in (STATE, HOST)
                size = _leaves(group) - transfer.staging - (group.size(transfer.target) if new else 0)
                yield f"leaf:{group.name}", max(size, 0), (at, at)
            self.born.setdefault(f"grad:{group.name}", at)
        if transfer.spent:
            yield self.end(f"{transfer.source}:{group.name}", group.size(transfer.source), at)
        if transfer.target == "param":
            self.begin(f"param:{group.name}", at)
        elif transfer.target not in (STATE, HOST, EDGE) and not transfer.late:
            self.born.setdefault(f"{transfer.target}:{group.name}", at)  # shards add up over microbatches
        if transfer.staging:
            self.begin(self._staging(at, group, transfer), at)
        if transfer.kind == "replica_reduce" and group.left_bytes:
            self.born[f"left:{group.name}"] = at

    def _wait(self, at: int, group: GroupInfo, transfer: Transfer) -> Ended:
        if transfer.late:
            self.born.setdefault(f"{transfer.target}:{group.name}", at + 1)
        if not transfer.spent and transfer.source not in (STATE, HOST, EDGE, SECOND, transfer.target):
            yield self.end(f"{transfer.source}:{group.name}", group.size(transfer.source), at)
        if transfer.staging:
            _, size, span = self.end(self._staging(at, group, transfer), transfer.staging, at)
            yield f"{transfer.kind}:{group.name}", size, span

    def _staging(self, at: int, group: GroupInfo, transfer: Transfer) -> str:
        """The item of a transfer under way; an edge may have several messages."""
        message = f"@{self.ops[at].microbatch}" if transfer.row.stage == "edge" else ""
        return f"{transfer.kind}:{group.name}{message}"

    def _kept(self, group: GroupInfo) -> str:
        """The item in which a gradient waits for its update; empty if no item does."""
        if group.name in self.flat:
            return "shard"
        target = self.paths[group.name][-1].target if self.paths[group.name] else HOST
        return "" if target == HOST else target

    @property
    def waiting_items(self) -> set[str]:
        """The items in which gradients wait for updates."""
        kept = [(self._kept(group), group.name) for group in self.groups]
        return {f"{item}:{name}" for item, name in kept if item}

    def _rest(self) -> Ended:
        """Gradients that wait for the next step's updates, or that nothing reads. Nothing else may be left."""
        for item, at in self.born.items():
            kind, _, name = item.partition(":")
            group = self.by_name[name]
            if kind not in (self._kept(group), "left"):
                raise schedule_refusals.broken_lifetime(item, at, str(self.ops[at]), "its lifetime never ends")
            yield item, group.size(kind), (at, len(self.ops) - 1)

    def _kept_between(self) -> Ended:
        """Return what has its memory from the first step on."""
        end = len(self.ops) - 1
        for group in self.groups:
            if group.copy_bytes:
                yield f"copy:{group.name}", group.copy_bytes, (0 if self._early else end, end)
            if group.cast_bytes:
                yield f"cast:{group.name}", group.cast_bytes, (0, end)

    @functools.cached_property
    def _early(self) -> bool:
        """Tell whether updates are those of this step.

        Then copies of the state are made before it, and else after it.
        """
        kinds = [op.kind for op in self.ops]
        return "backward" in kinds and "update" in kinds[kinds.index("backward") :]

    def _between(self) -> Ended:
        """Transfers between steps, in the step that holds most of them."""
        moves = [(group, move) for group in self.groups for move in group.exchanges]
        period = math.lcm(*(move.every for _, move in moves)) if moves else 0
        steps = [[(group, move) for group, move in moves if move.held(step)] for step in range(period)]
        end = len(self.ops) - 1
        for group, move in max(steps, key=lambda held: sum(move.staging for _, move in held), default=[]):
            yield f"{move.kind}:{group.name}", move.staging, (0 if move.delay else end, end)
        for group, _ in sorted(moves, key=lambda pair: pair[0].update_bytes)[-1:]:
            yield f"update:{group.name}", group.update_bytes, (end, end)


def _flat(groups: Sequence[GroupInfo], stages: StepProgram) -> frozenset[str]:
    """The groups whose gradients have no transfers: backwards fill what updates read."""
    filled = [(group, g in stages.fillings) for g, group in enumerate(groups)]
    return frozenset([group.name for group, fills in filled if fills and group.trainable and not group.reduced])


def _leaves(group: GroupInfo) -> int:
    """Bytes of the gradients of a group's leaves as autograd makes them, in the dtype of compute."""
    return min(group.grad_bytes, group.full_bytes or group.grad_bytes)
