"""Fragments of a model that travel together: ranges of shards, and the steps after which they leave and arrive.

All of it is arithmetic on a plan, the same on every rank. Fragments are ranges of the leaves, in the order of the plan,
so they do not depend on how many ranks hold a replica: a state that was saved with a fragment under way goes on, on
another number of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fshard.arguments import size_text
from fshard.errors import PlanError, lines
from fshard.patterns import bad_regex, meant_by
from fshard.schedule import GroupInfo
from fshard.schedule.transfers import STATE, PeriodicTransfer
from fshard.sharding.layout import Group
from fshard.sharding.leaf import Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.sharding.wire import WireFormat
from fshard.state.exchanges import Timetable

HEAD = 32
"""Bytes ahead of a difference: the step after which it left, its fragment, whether it is finite, and who stops."""


class Range(NamedTuple):
    """A part of a leaf that this rank holds: elements ``begin`` to ``end`` of its part of a group's shard.

    ``place`` is where it begins in a fragment's buffer, in elements.
    """

    path: str
    group: int
    begin: int
    end: int
    place: int


@dataclass(frozen=True)
class Fragment:
    """A part of the model that travels at once.

    Attributes:
        name: for people.
        ranges: what this rank holds of it.
        numel: the elements of this rank's buffer of it.
        dtype: of that buffer: the widest of the leaves, float32 at least.
        form: the format in which it travels; None for exact ones.
        most: the elements of the largest buffer of it that a rank has.
    """

    name: str
    ranges: tuple[Range, ...]
    numel: int
    dtype: torch.dtype
    form: WireFormat | None
    most: int

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's message to each other replica."""
        return self._message(self.numel)

    def info(self, axis: str, replicas: int, every: int, first: int, delay: int) -> GroupInfo:
        """Return what a schedule says of it: what the rank sends and holds that has most of it.

        Args:
            axis: that of the replicas.
            replicas: how many there are.
            every, first, delay: the steps after which it leaves, and for which it travels.
        """
        size, wire = self._message(self.most), "" if self.form is None else str(self.form)
        sizes = (replicas - 1) * size, (replicas + 1) * size  # what arrives of all replicas, and what this one sends
        move = PeriodicTransfer(
            "exchange", STATE, STATE, *sizes, axis, wire=wire, every=every, first=first, delay=delay
        )
        room = self.most * self.dtype.itemsize
        return GroupInfo(f"fragment {self.name}", 0, 0, 0, False, (move,), update_bytes=room)

    def _message(self, numel: int) -> int:
        return HEAD + (numel * self.dtype.itemsize if self.form is None else self.form.nbytes(numel))


def make_fragments(plan: Plan, wanted: int | Sequence[str], form: WireFormat | None) -> tuple[Fragment, ...]:
    """The fragments of a plan.

    Args:
        plan: the plan of one replica.
        wanted: their number, for ranges of equal size; or patterns on paths; a leaf belongs to the first that matches.
        form: the format in which they travel.

    Raises:
        PlanError: patterns that match no trained leaf, leaves that none matches, or more fragments than blocks.
    """
    block = form.block if form is not None else 1
    trained = [(group, number) for group in plan.groups for number, leaf in enumerate(group.leaves) if leaf.trainable]
    leaves = [group.leaves[number] for group, number in trained]
    if form is not None and form.largest:
        _check_whole_blocks(leaves, form)
    if isinstance(wanted, int):
        cuts = _equal_cuts(leaves, wanted, block)
        names = [f"{number + 1} of {wanted}" for number in range(wanted)]
    else:
        cuts, names = _matched(leaves, wanted), list(wanted)
    wide = max([torch.float32, *(leaf.dtype for leaf in leaves)], key=lambda dtype: dtype.itemsize)
    out = []
    for number, name in enumerate(names):
        held = [(place, parts[number]) for place, parts in zip(trained, cuts, strict=True) if number in parts]
        ranges, end = _ranges(plan, held, block, plan.mesh.rank)
        most = max(_ranges(plan, held, block, rank)[1] for rank in range(plan.mesh.size))
        out.append(Fragment(name, ranges, end, wide, form, most))
    return tuple(out)


Held = list[tuple[tuple[Group, int], tuple[int, int]]]
"""Leaves, each by its group and its number in it, and the elements of each."""


def _ranges(plan: Plan, held: Held, block: int, rank: int) -> tuple[tuple[Range, ...], int]:
    """Return what a rank holds of these elements, each range from a whole block on; and the length of their buffer."""
    ranges, end = list[Range](), 0
    for (group, number), (begin, stop) in held:
        first, last = _held(plan.mesh, group, number, begin, stop, rank)
        if first < last:
            ranges.append(Range(group.leaves[number].path, group.id, first, last, end))
            end += -(-(last - first) // block) * block
    return tuple(ranges), end


def _check_whole_blocks(leaves: Sequence[Leaf], form: WireFormat) -> None:
    """Refuse leaves that shards cut along a dim."""
    if cut := [leaf for leaf in leaves if leaf.gather_dim is not None]:
        rows = [f"{leaf.path}  {list(leaf.shape)}  {leaf.at_rest}" for leaf in cut]
        remedy = "Use flat=, such as fs.fsdp(axis), or wire='bf16'."
        head = f"wire={form.name!r}: shards cut these leaves within a block of {form.block}:"
        raise PlanError(lines(head, rows, remedy))


Cuts = list[dict[int, tuple[int, int]]]
"""For each leaf, its range of elements in each fragment, by the fragment's number."""


def _equal_cuts(leaves: Sequence[Leaf], number: int, block: int) -> Cuts:
    """Ranges of equal size, in blocks; leaves along whose dims shards are cut stay whole."""
    blocks = [-(-leaf.numel // block) for leaf in leaves]
    total = sum(blocks)
    if number > total:
        raise PlanError(f"fragments={number}: the trained leaves have {total} blocks of {block} elements: give fewer")
    ends = [total * (n + 1) // number for n in range(number)]
    out, at = [], 0
    for leaf, size in zip(leaves, blocks, strict=True):
        parts: dict[int, tuple[int, int]] = {}
        for fragment, end in enumerate(ends):
            begin = ends[fragment - 1] if fragment else 0
            if leaf.gather_dim is not None:
                low, high = (0, size) if begin <= at < end else (0, 0)
            else:
                low, high = max(begin - at, 0), min(end - at, size)
            if low < high:
                parts[fragment] = low * block, min(high * block, leaf.numel)
        out.append(parts)
        at += size
    return out


def _matched(leaves: Sequence[Leaf], patterns: Sequence[str]) -> Cuts:
    """Whole leaves by the first pattern that matches their path."""
    paths = [leaf.path for leaf in leaves]
    problems = [f"{pattern!r}: {bad}" for pattern in patterns if (bad := bad_regex(pattern))]
    if not problems:
        hits = [next((n for n, p in enumerate(patterns) if re.fullmatch(p, path)), None) for path in paths]
        problems = [
            f"{pattern!r} matches no trained leaf that no earlier one matches{meant_by(pattern, paths)}"
            for number, pattern in enumerate(patterns)
            if number not in hits
        ]
        problems += [f"{path} is in no fragment" for path, hit in zip(paths, hits, strict=True) if hit is None]
    if problems:
        raise PlanError(lines("fragments=:", problems, "Patterns must match whole paths; the last may be '.*'."))
    return [{hit or 0: (0, leaf.numel)} for leaf, hit in zip(leaves, hits, strict=True)]


def _held(mesh: Mesh, group: Group, number: int, begin: int, end: int, rank: int) -> tuple[int, int]:
    """The range of a rank's part of a group's shard that has these elements of a leaf; an empty one for none."""
    owned = group.owned
    first, last = owned.shard_range(number, mesh.index(owned.gather_axes, rank))
    start = owned.piece(number, mesh, rank).start if group.kind == "flat" else 0
    low, high = max(begin - start, 0), min(end - start, last - first)
    return first + low, first + max(low, high)


def table_of(fragments: Sequence[Fragment], table: Timetable, replicas: int, form: WireFormat | None) -> str:
    """Return what travels when, as text."""
    what = form if form is not None else "exact"
    rows = [
        f"fragment {fragment.name}: {size_text(fragment.nbytes * (replicas - 1))} a rank, leaves after steps "
        f"{table.offset(n) or table.every}, {(table.offset(n) or table.every) + table.every}, ..."
        for n, fragment in enumerate(fragments)
    ]
    arrives = f"{table.delay} step{'s' * (table.delay > 1)} later" if table.delay else "at once"
    return "\n".join(
        [f"{len(fragments)} fragments every {table.every} steps in {what}, which arrive {arrives}:", *rows]
    )
