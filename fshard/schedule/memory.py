"""Memory: what a step holds at each op beside its state, and where the arena keeps it, known before anything runs.

The arena holds one kind of item: ``param:g``, the gathered buffer of group g, from its gather to its free. Each has
one offset for all its lifetimes, so views of it can be made once (static slots). The other kinds come and go beside
it, so that they take memory in the backward, when activations no longer do: ``grad:g``, the full flat gradient,
from the first backward op of a reader to the collect; ``stage:g``, what its reduction needs besides, from reduce to
collect; and ``shard:g``, this rank's part of the reduced gradient, to the update, which with deferred updates is in the
next step: from the first reduce, or, where that is summed up in its staging (``GroupInfo.lands``), from after its
collect. A sum over replicas needs ``sum:g`` from its issue to its total. Where a rank updates but a part of its shard,
that part of the summed gradient is ``own:g``: there from the sum to the update, in the place of ``shard:g``, which
ends with the total. Until its reduce a gradient is what autograd made, a tensor a leaf; the flat one is filled then,
so that for a moment there are two. That is ``leaf:g``, less stage and shard where these come after it. A gradient that
no backward op fills lives from reduce to collect, and one that is not reduced at all is no
item: it is kept between steps. The gradient of a group that is updated in host memory has its ``shard:g``, or
``own:g``, until it is stored there. What comes from there for an update on the device is ``visit:g``, for that op.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

from fshard import errors
from fshard.schedule.ops import GroupInfo, Op, Program
from fshard.schedule.pack import Span, pack

ALIGN = 256
"""Bytes: items start at multiples of it, which suits vector loads and collectives on every device."""


@dataclass(frozen=True)
class Memory:
    """The memory of one schedule. All sizes are bytes, rounded up to ``ALIGN``.

    Attributes:
        arena_bytes: the size of the arena.
        lower_bound: the most bytes of arena items alive at once, which no arena can go below. With one offset
            for all lifetimes of an item it cannot always be reached; most arenas reach it.
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
        """Where an item, such as ``"param:blocks.3"``, starts in the arena.

        Raises:
            KeyError: the schedule never has this item.
        """
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


def plan_memory(ops: Sequence[Op], groups: Sequence[GroupInfo], program: Program, train: bool) -> Memory:
    """Lifetimes of everything that these ops hold, and offsets of what lies in the arena.

    Raises:
        ScheduleError: a lifetime is begun twice, or ended without having begun.
    """
    sizes: dict[str, int] = {}
    lifetimes: dict[str, list[Span]] = {}
    for item, size, span in _lives(ops, groups, program, train):
        sizes[item] = -(-size // ALIGN) * ALIGN
        lifetimes.setdefault(item, []).append(span)
    spans = {item: tuple(lives) for item, lives in lifetimes.items()}
    inside = {item: size for item, size in sizes.items() if item.startswith("param:")}
    alive = _profile(len(ops), inside, spans)
    beside = _profile(len(ops), {item: size for item, size in sizes.items() if item not in inside}, spans)
    bound = max(alive, default=0)
    offsets = dict(zip(inside, pack(list(inside.values()), [spans[item] for item in inside], bound), strict=True))
    arena = max((offsets[item] + size for item, size in inside.items()), default=0)
    return Memory(
        arena_bytes=arena,
        lower_bound=bound,
        peak_bytes=arena + max(beside, default=0),
        offsets=offsets,
        sizes=sizes,
        lifetimes=spans,
        profile=tuple(map(add, alive, beside)),
        beside=beside,
    )


def size_text(count: int) -> str:
    """A number of bytes for people.

    >>> size_text(1536)
    '1.5 KiB'
    """
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def _lives(
    ops: Sequence[Op], groups: Sequence[GroupInfo], program: Program, train: bool
) -> Iterator[tuple[str, int, Span]]:
    """Item, bytes and span of every lifetime, as they end."""
    lives = _Lives(ops, groups, program, train)
    for at, op in enumerate(ops):
        if op.kind == "backward":
            for group in lives.filled.get(op.target, ()):
                lives.born.setdefault(f"grad:{group.name}", at)
        elif op.target in lives.by_name:
            yield from lives.take(at, op, lives.by_name[op.target])
    yield from lives.rest()


class _Lives:
    """The items that are alive, and since when. ``sizes`` are those of what waits for the update, by item."""

    def __init__(self, ops: Sequence[Op], groups: Sequence[GroupInfo], program: Program, train: bool) -> None:
        self.ops = ops
        self.by_name = {group.name: group for group in groups}
        reduced = [train and group.trainable and group.reduced for group in groups]
        self.filled = {unit: [groups[i] for i in ids if reduced[i]] for unit, ids in program.reads.items()}
        self.born: dict[str, int] = {}
        self.rounds = Counter(op.target for op in ops if op.kind == "reduce")
        self.kept = {group.name for group, due in zip(groups, reduced, strict=True) if due}

    def begin(self, item: str, at: int) -> None:
        """An item that must not be alive yet."""
        if item in self.born:
            raise errors.broken_lifetime(item, at, str(self.ops[at]), f"it is alive since op {self.born[item]}")
        self.born[item] = at

    def end(self, item: str, size: int, at: int) -> tuple[str, int, Span]:
        """An item that must be alive."""
        if item not in self.born:
            raise errors.broken_lifetime(item, at, str(self.ops[at]), "no lifetime of it has begun")
        return item, size, (self.born.pop(item), at)

    def take(self, at: int, op: Op, group: GroupInfo) -> Iterator[tuple[str, int, Span]]:
        """What ends with an op on a group."""
        name = group.name
        if op.kind == "gather":
            self.begin(f"param:{name}", at)
        elif op.kind == "free":
            yield self.end(f"param:{name}", group.full_bytes, at)
        elif op.kind == "reduce":
            if f"grad:{name}" in self.born:
                yield f"leaf:{name}", _leaf_bytes(group, self.rounds[name]), (at, at)
            self.born.setdefault(f"grad:{name}", at)
            if not group.lands:
                self.born.setdefault(f"shard:{name}", at)
            if group.stage_bytes:
                self.begin(f"stage:{name}", at)
        elif op.kind == "collect":
            self.born.setdefault(f"shard:{name}", at + 1)  # if not before: then the flat gradient goes first
            yield self.end(f"grad:{name}", group.grad_bytes, at)
            if group.stage_bytes:
                yield self.end(f"stage:{name}", group.stage_bytes, at)
        elif op.kind in ("sum", "total", "update", "stored"):
            yield from self._complete(at, op, group)

    def _complete(self, at: int, op: Op, group: GroupInfo) -> Iterator[tuple[str, int, Span]]:
        """What ends with an op on a gradient that holds all microbatches."""
        name, parted = group.name, group.own_bytes > 0 and group.summed
        if op.kind == "sum":
            if group.sum_bytes:
                self.begin(f"sum:{name}", at)
            if parted:
                self.born.setdefault(f"own:{name}", at)
        elif op.kind == "total":
            if group.sum_bytes:
                yield self.end(f"sum:{name}", group.sum_bytes, at)
            if parted:
                yield self.end(f"shard:{name}", group.shard_bytes, at)
        elif name in self.kept and (op.kind == "stored" or not group.offloaded):
            # Deferred: the gradient is that of the step before.
            item, size = (f"own:{name}", group.own_bytes) if parted else (f"shard:{name}", group.shard_bytes)
            yield item, size, (self.born.pop(item, 0), at)
        if op.kind == "update" and group.visit_bytes:
            yield f"visit:{name}", group.visit_bytes, (at, at)

    def rest(self) -> Iterator[tuple[str, int, Span]]:
        """What waits for the next step's updates. Nothing else may be left."""
        for item, at in self.born.items():
            kind, _, name = item.partition(":")
            if kind not in ("shard", "own"):
                raise errors.broken_lifetime(item, at, str(self.ops[at]), "its lifetime never ends")
            group = self.by_name[name]
            yield item, group.shard_bytes if kind == "shard" else group.own_bytes, (at, len(self.ops) - 1)


def _leaf_bytes(group: GroupInfo, rounds: int) -> int:
    """What a gradient's being there twice adds to the peak of its reduce. A shard is new in the first round alone."""
    new = group.shard_bytes if rounds == 1 and not group.lands else 0
    return max(group.grad_bytes - group.stage_bytes - new, 0)


def _profile(count: int, sizes: Mapping[str, int], spans: Mapping[str, Sequence[Span]]) -> tuple[int, ...]:
    steps = [0] * (count + 1)
    for item, size in sizes.items():
        for first, last in spans[item]:
            steps[first] += size
            steps[last + 1] -= size
    return tuple(accumulate(steps[:count]))
