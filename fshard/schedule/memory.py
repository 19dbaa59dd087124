"""Memory: what the arena holds at each op, and where, known before anything runs.

Three kinds of item live in the arena: ``param:g``, the gathered buffer of group g, from its gather to its
free; ``grad:g``, its full flat gradient, from the first backward op of a reader to the collect; ``stage:g``,
what its reduction needs besides, from reduce to collect. A gradient that no backward op fills lives from
reduce to collect, and one that is not reduced at all is no item: it is kept between steps. Each item has one
offset for all its lifetimes, so views of it can be made once (static slots).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from fshard import errors
from fshard.schedule.ops import GroupInfo, Op, Program
from fshard.schedule.pack import Span, pack

ALIGN = 256
"""Bytes: items start at multiples of it, which suits vector loads and collectives on every device."""


@dataclass(frozen=True)
class Memory:
    """The arena of one schedule. All sizes are bytes, rounded up to ``ALIGN``.

    Attributes:
        arena_bytes: the size of the arena.
        lower_bound: the most bytes alive at once, which no arena can go below. With one offset for all
            lifetimes of an item it cannot always be reached; most arenas reach it, and the worst seen
            was an eighth above it.
        offsets: the offset of each item.
        sizes: the size of each item.
        lifetimes: first and last op, both included, of each item's lifetimes.
        profile: bytes alive at each op.
    """

    arena_bytes: int
    lower_bound: int
    offsets: Mapping[str, int] = field(repr=False, hash=False)
    sizes: Mapping[str, int] = field(repr=False, hash=False)
    lifetimes: Mapping[str, tuple[Span, ...]] = field(repr=False, hash=False)
    profile: tuple[int, ...] = field(repr=False)

    def offset(self, item: str) -> int:
        """Where an item, such as ``"param:blocks.3"``, starts in the arena.

        Raises:
            KeyError: the schedule never has this item.
        """
        return self.offsets[item]

    def peak(self, op: int) -> int:
        """Bytes alive while op number ``op`` runs."""
        return self.profile[op]

    def __str__(self) -> str:
        busiest = self.profile.index(self.lower_bound) if self.profile else 0
        alive = size_text(self.lower_bound)
        rows = [f"arena {size_text(self.arena_bytes)}; at most {alive} alive, at op {busiest}"]
        width = max(map(len, self.offsets), default=0)
        for item, offset in sorted(self.offsets.items(), key=lambda pair: pair[1]):
            lives = ", ".join(f"{first}-{last}" for first, last in self.lifetimes[item])
            rows.append(f"{offset:>14} {item:<{width}}  {size_text(self.sizes[item]):>10}  ops {lives}")
        return "\n".join(rows)


def plan_memory(ops: Sequence[Op], groups: Sequence[GroupInfo], program: Program, train: bool) -> Memory:
    """Lifetimes and offsets of everything that these ops put into the arena.

    Raises:
        ScheduleError: a lifetime is begun twice, or ended without having begun.
    """
    sizes: dict[str, int] = {}
    lifetimes: dict[str, list[Span]] = {}
    for item, size, span in _lives(ops, groups, program, train):
        sizes[item] = -(-size // ALIGN) * ALIGN
        lifetimes.setdefault(item, []).append(span)
    spans = [tuple(lives) for lives in lifetimes.values()]
    profile = _profile(len(ops), list(sizes.values()), spans)
    bound = max(profile, default=0)
    offsets = dict(zip(sizes, pack(list(sizes.values()), spans, bound), strict=True))
    return Memory(
        arena_bytes=max((offsets[item] + sizes[item] for item in sizes), default=0),
        lower_bound=bound,
        offsets=offsets,
        sizes=sizes,
        lifetimes=dict(zip(sizes, spans, strict=True)),
        profile=profile,
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
    by_name = {group.name: group for group in groups}
    reduced = [train and group.trainable and group.reduced for group in groups]
    filled = {unit: [groups[i] for i in ids if reduced[i]] for unit, ids in program.reads.items()}
    born: dict[str, int] = {}

    def begin(item: str, at: int) -> None:
        if item in born:
            raise errors.broken_lifetime(item, at, str(ops[at]), f"it is alive since op {born[item]}")
        born[item] = at

    def end(item: str, size: int, at: int) -> tuple[str, int, Span]:
        if item not in born:
            raise errors.broken_lifetime(item, at, str(ops[at]), "no lifetime of it has begun")
        return item, size, (born.pop(item), at)

    for at, op in enumerate(ops):
        name = op.target
        if op.kind == "gather":
            begin(f"param:{name}", at)
        elif op.kind == "free":
            yield end(f"param:{name}", by_name[name].full_bytes, at)
        elif op.kind == "backward":
            for group in filled.get(name, ()):
                born.setdefault(f"grad:{group.name}", at)
        elif op.kind == "reduce":
            born.setdefault(f"grad:{name}", at)
            if by_name[name].stage_bytes:
                begin(f"stage:{name}", at)
        elif op.kind == "collect":
            yield end(f"grad:{name}", by_name[name].grad_bytes, at)
            if by_name[name].stage_bytes:
                yield end(f"stage:{name}", by_name[name].stage_bytes, at)
    for item, at in born.items():
        raise errors.broken_lifetime(item, at, str(ops[at]), "its lifetime never ends")


def _profile(count: int, sizes: Sequence[int], spans: Sequence[Sequence[Span]]) -> tuple[int, ...]:
    steps = [0] * (count + 1)
    for size, lives in zip(sizes, spans, strict=True):
        for first, last in lives:
            steps[first] += size
            steps[last + 1] -= size
    return tuple(accumulate(steps[:count]))
