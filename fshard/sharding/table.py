"""``print(plan)``: the plan as a table."""

import math
from collections.abc import Mapping

import torch

from fshard.arguments import size_text
from fshard.model.precision import Precision
from fshard.sharding.layout import Group, Leaf
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import P, axes_of

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
    return text + f" {leaf.kinds}".rstrip()


def render(
    mesh: Mesh,
    batch: P,
    leaves: Mapping[str, Leaf],
    places: Mapping[str, tuple[Group, int]],
    precision: Precision,
) -> str:
    """The table of a plan: path, typed shape, group, bytes on this rank; then the totals."""
    held = {
        path: group.piece(number, mesh).numel * group.leaves[number].dtype.itemsize
        for path, (group, number) in places.items()
    }
    rows = [("path", "leaf", "group", "bytes a rank")]
    for path, leaf in leaves.items():
        tied = "".join(f" (= {alias})" for alias in leaf.aliases)
        rows.append((path + tied, _typed(leaf), places[path][0].name, f"{held[path]:,}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-" * widths[3]))
    row = f"{{:<{widths[0]}}}  {{:<{widths[1]}}}  {{:<{widths[2]}}}  {{:>{widths[3]}}}"
    text = [row.format(*cells) for cells in rows]
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    count = sum(math.prod(leaf.shape) for leaf in leaves.values())
    groups = len({group.id for group, _ in places.values()})
    hosted = sum(held[path] for path, leaf in leaves.items() if leaf.kinds.hosted)
    foot = (
        f"{len(leaves)} leaves in {groups} groups; {count:,} parameters, {size_text(whole)} whole, "
        f"{size_text(sum(held.values()))} on rank {mesh.rank}"
        + (f", of which {size_text(hosted)} in host memory" if hosted else "")
    )
    return "\n".join([_head(mesh, batch, precision), *text, foot, *_paddings(places), *_wires(places)])


def _head(mesh: Mesh, batch: P, precision: Precision) -> str:
    axes = " x ".join(f"{name}={size}" for name, size in mesh.shape.items())
    chosen = {name: getattr(precision, name) for name in ("compute", "reduce", "output", "buffers")}
    dtypes = [f", {what} in {SHORT[dtype]}" for what, dtype in chosen.items() if dtype is not None]
    return f"mesh {axes}, batch {batch}, rank {mesh.rank}, {mesh.device.type}{''.join(dtypes)}"


def _wires(places: Mapping[str, tuple[Group, int]]) -> list[str]:
    """What compressed transfers move, a line for each kind and format."""
    found: dict[str, list[tuple[int, int]]] = {}
    for group in {group.id: group for group, _ in places.values()}.values():
        for kind, form in group.wires.items():
            numel = {"replica_reduce": group.owned.chunk, "update_gather": group.chunk}.get(kind, group.numel)
            exact = group.compute_dtype if kind == "all_gather" else group.dtype
            if kind == "all_gather" or group.trainable:
                found.setdefault(f"{kind} in {form}", []).append((form.nbytes(numel), numel * exact.itemsize))
    return [
        f"{what}: {size_text(sum(packed for packed, _ in sizes))}, of {size_text(sum(exact for _, exact in sizes))}, "
        f"in {len(sizes)} groups"
        for what, sizes in found.items()
    ]


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
