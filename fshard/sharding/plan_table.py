"""``print(plan)``: the plan as a table."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from fshard import markup
from fshard.arguments import size_text
from fshard.model.precision import Precision
from fshard.sharding.float8_leaves import products_told
from fshard.sharding.layout import Group
from fshard.sharding.leaf import Leaf
from fshard.sharding.low_rank import most_travels
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.spec import P, axes_of
from fshard.sharding.stage_table import StageTable

SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def _typed(leaf: Leaf) -> str:
    """A leaf in JAX's notation: ``f32[4096@tp, 1024]``, then ``@flat(data)`` for a flat-sharded leaf.

    ``opt@flat(replica)``: these axes cut its optimizer state further. Then what it says beside its specs.
    """
    entries = (*leaf.at_rest.dims, *[None] * len(leaf.shape))
    dims = [f"{n}@{'+'.join(axes_of(e))}" if e else str(n) for n, e in zip(leaf.shape, entries, strict=False)]
    name = SHORT.get(leaf.dtype, str(leaf.dtype).removeprefix("torch."))
    flat = axes_of(leaf.at_rest.flat)
    text = f"{name}[{', '.join(dims)}]" + (f"@flat({'+'.join(flat)})" if flat else "")
    text += f" opt@flat({'+'.join(leaf.opt_axes)})" if leaf.opt_axes else ""
    text += ("" if leaf.trainable else " frozen") + (f" align={leaf.align}" if leaf.align else "")
    text += f" in {leaf.packed}" if leaf.packed is not None else ""
    return text + f" {leaf.kinds}".rstrip()


COLUMNS = 4
"""Ranks that have a column each in the table of a plan; of more, the least and the most are shown."""

Leaves = Mapping[str, Leaf]
Places = Mapping[str, tuple[Group, int]]


def held(mesh: Mesh, places: Places, stages: StageTable | None = None) -> dict[str, list[int]]:
    """The bytes of each leaf on every rank. Ranks of other stages hold none of it."""
    out, positions = {}, dict[Axes, list[int]]()
    at = [mesh.index(stages.axis, rank) for rank in range(mesh.size)] if stages is not None else []
    for path, (group, number) in places.items():
        leaf = group.leaves[number]
        axes = leaf.at_rest.axes
        if axes not in positions:
            positions[axes] = [mesh.index(axes, rank) for rank in range(mesh.size)]
        size = {
            positions[axes][rank]: leaf.nbytes(group.piece(number, mesh, rank).numel) for rank in mesh.ranks(axes, 0)
        }
        out[path] = [size[position] for position in positions[axes]]
        if stages is not None:
            homes = stages.positions(path)
            out[path] = [number if place in homes else 0 for number, place in zip(out[path], at, strict=True)]
    return out


def render(
    mesh: Mesh, batch: P, leaves: Leaves, places: Places, precision: Precision, stages: StageTable | None = None
) -> str:
    """The table of a plan: path, typed shape, group, stages if there are any, bytes on all ranks; then the totals."""
    head, body, totals = columns(mesh, leaves, places, stages)
    text = markup.aligned([head, *body], [n < 3 for n in range(len(head))], rule=True)
    return "\n".join(
        [_head(mesh, batch, precision), *text, totals, *_paddings(places), *_wires(places), *products_told(leaves)]
    )


def columns(
    mesh: Mesh, leaves: Leaves, places: Places, stages: StageTable | None = None
) -> tuple[list[str], list[list[str]], str]:
    """The titles, the rows and the last line of the table."""
    sizes = held(mesh, places, stages)
    few, staged = mesh.size <= COLUMNS, ["stage"] if stages is not None else []
    head = ["path", "leaf", "group", *staged, *(f"rank {rank}" for rank in range(mesh.size) if few)]
    rows = []
    for path, leaf in leaves.items():
        tied = "".join(f" (= {alias})" for alias in leaf.aliases)
        amounts = sizes[path] if few else _range(mesh, sizes[path], path, stages)
        on = [", ".join(map(str, stages.leaves[path]))] if stages is not None else []
        rows.append([path + tied, _typed(leaf), places[path][0].name, *on, *(f"{amount:,}" for amount in amounts)])
    head += [] if few else ["least bytes", "most bytes"]
    return head, rows, _totals(mesh, leaves, places, sizes)


def _range(mesh: Mesh, sizes: Sequence[int], path: str, stages: StageTable | None) -> tuple[int, int]:
    """The least and the most bytes of a leaf, on the ranks of its stages."""
    if stages is not None:
        homes = stages.positions(path)
        sizes = [size for rank, size in enumerate(sizes) if mesh.index(stages.axis, rank) in homes]
    return min(sizes), max(sizes)


def _totals(mesh: Mesh, leaves: Leaves, places: Places, sizes: Mapping[str, list[int]]) -> str:
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    groups = len({group.id for group, _ in places.values()})
    sums = [sum(size[rank] for size in sizes.values()) for rank in range(mesh.size)]
    hosted = sum(sizes[path][mesh.rank] for path, leaf in leaves.items() if leaf.kinds.hosted)
    if mesh.size <= COLUMNS:
        each = ", ".join(f"{size_text(total)} on rank {rank}" for rank, total in enumerate(sums))
    else:
        each = f"{size_text(min(sums))} to {size_text(max(sums))} a rank"
    return f"{len(leaves)} leaves in {groups} groups; {count:,} parameters, {size_text(whole)} whole; {each}" + (
        f"; {size_text(hosted)} of rank {mesh.rank} in host memory" if hosted else ""
    )


def render_html(
    mesh: Mesh,
    batch: P,
    leaves: Leaves,
    places: Places,
    precision: Precision,
    summary: str,
    stages: StageTable | None = None,
) -> str:
    """The same in a notebook: a bar of bytes for each rank, and the table, unit by unit."""
    of: dict[str, list[str]] = {}
    for path, (group, _) in places.items():
        of.setdefault(group.unit, []).append(path)
    head, rows, totals = columns(mesh, leaves, places, stages)
    row_of = dict(zip(leaves, rows, strict=True))
    folds = [
        markup.fold(
            f"{unit}: {len(paths)} leaves", markup.table(head, [row_of[path] for path in paths], 3), len(of) == 1
        )
        for unit, paths in of.items()
    ]
    more = f"{mesh.size - MOST_BARS} more ranks" if mesh.size > MOST_BARS else ""
    lines = [f"<div>{markup.escape(line)}</div>" for line in (_head(mesh, batch, precision), totals)]
    bars = rank_bars(mesh, held_of_units(mesh, places, stages), MOST_BARS)
    return markup.shown(summary, *lines, bars, markup.escape(more), *folds)


def held_of_units(mesh: Mesh, places: Places, stages: StageTable | None = None) -> dict[str, tuple[int, ...]]:
    """The bytes of each unit on every rank."""
    rows: dict[str, list[list[int]]] = {}
    for path, sizes in held(mesh, places, stages).items():
        rows.setdefault(places[path][0].unit, []).append(sizes)
    return {unit: tuple(map(sum, zip(*sizes, strict=True))) for unit, sizes in rows.items()}


def rank_bars(mesh: Mesh, units: Mapping[str, Sequence[int]], most: int | None = None) -> str:
    """A bar for each rank, or the first ones, of what it holds of each unit."""
    sums = [sum(column) for column in zip(*units.values(), strict=True)]
    rows = [
        [rank_text(mesh, rank), f"{total:,}", markup.bar([(unit, row[rank]) for unit, row in units.items()], max(sums))]
        for rank, total in enumerate(sums[:most])
    ]
    return markup.table(["rank", "bytes", ""], rows)


def rank_text(mesh: Mesh, rank: int) -> str:
    """A rank and, on a mesh of several axes, where it is along each."""
    return f"{rank} {mesh.coords(rank)}" if len(mesh.sizes) > 1 else f"{rank}"


MOST_BARS = 16
"""Ranks that have a bar each."""


def _head(mesh: Mesh, batch: P, precision: Precision) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    chosen = {name: getattr(precision, name) for name in ("compute", "reduce", "output", "buffers")}
    dtypes = [f", {what} in {SHORT[dtype]}" for what, dtype in chosen.items() if dtype is not None]
    return f"mesh {axes}, batch {batch}, rank {mesh.rank}, {mesh.device.type}{''.join(dtypes)}"


def _wires(places: Mapping[str, tuple[Group, int]]) -> list[str]:
    """Return what is kept packed, and what compressed transfers move, a line for each kind and format."""
    found: dict[str, list[tuple[int, int]]] = {}
    groups = {group.id: group for group, _ in places.values()}.values()
    kept = [group for group in groups if group.feedback]
    for group in groups:
        for what, sizes in (*_at_rest(group), *_moved(group)):
            found.setdefault(what, []).append(sizes)
    left = [group.owned.chunk * group.residual_dtype.itemsize for group in kept]
    return [
        f"{what}: {size_text(sum(packed for packed, _ in sizes))}, of {size_text(sum(exact for _, exact in sizes))}, "
        f"in {len(sizes)} groups"
        for what, sizes in found.items()
    ] + [f"what rounding leaves out of sums: {size_text(sum(left))} a rank, in {len(left)} groups"] * bool(left)


def _at_rest(group: Group) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return what a group is kept in, if that is a format of few bits, and its bytes in that and in its dtype."""
    if group.packed is not None:
        exact = sum(leaf.numel * leaf.dtype.itemsize for leaf in group.leaves)
        yield f"at rest in {group.packed}", (sum(leaf.nbytes(leaf.numel) for leaf in group.leaves), exact)


def _moved(group: Group) -> Iterator[tuple[str, tuple[int, int]]]:
    """The compressed transfers of a group, and their bytes in their formats and in its dtype."""
    for kind, form in group.wires.items():
        numel = {"replica_reduce": group.owned.chunk, "update_gather": group.chunk}.get(kind, group.numel)
        dtype = group.compute_dtype if kind == "all_gather" else group.dtype
        if group.trainable or (kind == "all_gather" and (group.travels or group.packed is None)):
            size = form.nbytes(numel) if not form.rank else most_travels(group.owned, form.rank) * dtype.itemsize
            yield f"{kind} in {form}", (size, numel * dtype.itemsize)


def _paddings(places: Mapping[str, tuple[Group, int]]) -> list[str]:
    """The padding that ``align=`` costs, a line for each group that has it."""
    groups = {group.id: group for group, _ in places.values() if any(leaf.align for leaf in group.leaves)}
    out = []
    for group in groups.values():
        spare = group.numel - sum(leaf.numel for leaf in group.leaves)
        share = spare / max(1, group.numel)
        out.append(
            f"{group.name}: {size_text(spare * group.dtype.itemsize)} of padding, {share:.1%}, in {group.parts} chunks"
        )
    return out
