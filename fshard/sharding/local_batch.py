"""A rank's part of a global batch, by the spec of the batch."""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import TreeError, lines
from fshard.sharding.mesh import Mesh
from fshard.sharding.spec import P, axes_of

REMEDY = (
    "All ranks get equal parts: drop rows, or pad them and give them no weight in an fs.Mean. A value that is not a "
    "row of the batch, the same on every rank, is fs.Whole(value), read as .value."
)


@dataclasses.dataclass
class Rows:
    """A part of a batch that has rows of its own, as many as it likes: points on the boundary of a domain, for one.

    Ranks and microbatches share its rows as they share those of the rest, in equal parts.

    Attributes:
        value: any pytree. The loss function reads it as ``batch["boundary"].value``.

    >>> mesh = fs.abstract_mesh((2,), ("data",))
    >>> plan = fs.make_plan({"w": torch.zeros(4)}, mesh, [(".*", fs.P())], batch=fs.P("data"))
    >>> part = plan.local_batch({"inside": torch.zeros(8, 2), "boundary": fs.Rows(torch.zeros(4, 2))})
    >>> part["inside"].shape, part["boundary"].value.shape
    (torch.Size([4, 2]), torch.Size([2, 2]))
    """

    value: Any


def local_part(batch: Any, spec: P, mesh: Mesh) -> Any:
    """The part of a global batch that this rank computes: views of the batch's tensors.

    Args:
        batch: a pytree, the same on every rank.
        spec: the axes that cut each dim of its tensors.
        mesh: the mesh, seen from this rank.

    Raises:
        TreeError: sizes that do not divide, an array that is not a tensor, or nothing to cut.
    """
    leaves, structure = tree.flatten(batch)
    wrong = [
        f"{name}: {problem}"
        for name, leaf in zip(tree.names(batch, "batch"), leaves, strict=True)
        if (problem := _problem(leaf, spec, mesh))
    ]
    if wrong:
        raise TreeError(lines(f"plan.local_batch(batch) cannot cut the batch by {spec}:", wrong, REMEDY))
    if not any(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise TreeError(f"plan.local_batch(batch): batch is {described(batch)} without a tensor that has rows")
    alike = tree.swap(lambda rows: None, Rows, batch)
    _tell_unlike(dict(zip(tree.names(alike, "batch"), tree.leaves(alike), strict=True)), spec, mesh)
    return tree.unflatten(structure, [_cut(leaf, spec, mesh) for leaf in leaves])


def _tell_unlike(leaves: Mapping[str, Any], spec: P, mesh: Mesh) -> None:
    """Warn where leaves of different sizes are cut: some of them may be no rows of the batch."""
    for dim, entry in enumerate(spec.dims):
        parts = mesh.axis_size(axes_of(entry))
        sizes = {name: leaf.shape[dim] for name, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.ndim > dim}
        if parts == 1 or len(set(sizes.values())) < 2:
            continue
        ((common, times), *others) = Counter(sizes.values()).most_common()
        tied = bool(others) and others[0][1] == times
        odd = [name for name, size in sizes.items() if tied or size != common]
        shapes = ", ".join(f"{name} {list(leaves[name].shape)}" for name in odd)
        warnings.warn(
            f"plan.local_batch(batch): leaves have different sizes along dim {dim}"
            + ("" if tied else f", {common} in most of them")
            + f", and all are cut into {parts} parts by {spec}: {shapes}. A value that is the same for all rows, "
            f"such as class weights or a mask, is fs.Whole(value): every rank gets all of it. Rows of several sets, "
            f"such as points inside of a domain and on its boundary, are cut right: fs.Rows(points) says that a set "
            f"has rows of its own. The loss reads both as .value",
            stacklevel=4,
        )


def without_rows(leaf: Any) -> str:
    """Say why the rows of a leaf cannot be cut, whatever their number; or nothing."""
    if not isinstance(leaf, Tensor):
        return f"{described(leaf)}, no tensor: give torch.as_tensor of it" if getattr(leaf, "shape", ()) else ""
    if leaf.is_nested:
        return "a nested tensor, whose rows PyTorch does not cut: pad it, or cut it yourself"
    if leaf.layout is not torch.strided:
        return f"a tensor of {leaf.layout}, whose rows PyTorch does not cut: make it dense, or cut it yourself"
    return ""


def _problem(leaf: Any, spec: P, mesh: Mesh) -> str:
    """Say why a leaf cannot be cut; or nothing."""
    if (problem := without_rows(leaf)) or not isinstance(leaf, Tensor):
        return problem
    for dim, entry in enumerate(spec.dims[: leaf.ndim]):
        parts = mesh.axis_size(axes_of(entry))
        if leaf.shape[dim] % parts:
            axes = "+".join(axes_of(entry))
            return f"shape {list(leaf.shape)}: dim {dim} is not a multiple of {parts}, the size of {axes!r}"
    return ""


def _cut(leaf: Any, spec: P, mesh: Mesh) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    for dim, entry in enumerate(spec.dims[: leaf.ndim]):
        axes = axes_of(entry)
        size = leaf.shape[dim] // mesh.axis_size(axes)
        leaf = leaf.narrow(dim, mesh.index(axes) * size, size)
    return leaf
