"""Random trees of shards: directions that do not depend on the mesh."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.model import random
from fshard.sharding.layout import Piece, global_index
from fshard.sharding.leaf import Leaf
from fshard.sharding.plan import Plan
from fshard.state.elementwise import know_shards
from fshard.transform.tree_vectors import expect_plan

SIGNS = 128
"""The signs of one counter of Philox: a bit each of its four words."""

Draw = Callable[[int, Leaf, Piece], Tensor]
"""Draws a piece of a leaf, given the number of the leaf in the plan."""


def normal(key: Tensor, plan: Plan) -> dict[str, Any]:
    """A tree of shards of standard normal numbers, which do not depend on the mesh. Local.

    Outside of ``run`` of a virtual mesh it is a tree of whole tensors.

    Args:
        key: of ``fs.random``, the same on every rank.
        plan: the plan. Frozen leaves get zeros.

    Raises:
        PlanError: invalid arguments.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.tree.normal(fs.random.key(0), plan)["w"].shape
    torch.Size([4])
    """

    def draw(number: int, leaf: Leaf, piece: Piece) -> Tensor:
        own = random.fold_in(key.to(plan.mesh.device), number)
        if piece.shape == leaf.shape:
            return random.normal(own, (piece.numel,), leaf.dtype, start=piece.start)
        box = random.normal(own, piece.shape, leaf.dtype, start=piece.offset, of=leaf.shape)
        return box.reshape(-1)[piece.start : piece.stop]

    return _drawn(key, plan, lambda: draw)


def rademacher(key: Tensor, plan: Plan) -> dict[str, Any]:
    """A tree of shards of signs, -1 or 1, which do not depend on the mesh. Arguments are those of ``normal``.

    Args:
        key: of ``fs.random``, the same on every rank.
        plan: the plan. Frozen leaves get zeros.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> fs.tree.rademacher(fs.random.key(0), plan)["w"].abs()
    tensor([1., 1., 1., 1.])
    """
    return _drawn(key, plan, lambda: _signs(key, plan))


def _signs(key: Tensor, plan: Plan) -> Draw:
    """Draws signs. The words of all leaves come of one run of Philox: one for each small leaf would be mostly calls."""
    device = plan.mesh.device
    sizes = [-(-math.prod(leaf.shape) // SIGNS) for leaf in plan.leaves.values()]
    spans = [
        _span(leaf, _piece(plan, path), size) for (path, leaf), size in zip(plan.leaves.items(), sizes, strict=True)
    ]
    begins = accumulate(sizes, initial=0)
    runs = [
        torch.arange(at + span.start, at + span.stop, device=device) for at, span in zip(begins, spans, strict=False)
    ]
    part = random.DrawnBox.of((4 * sum(sizes),), 0, None)
    words = random.draw_words(key.to(device), part, torch.cat(runs)).to(torch.int32)
    own = torch.split(words, [len(span) for span in spans])

    def draw(number: int, leaf: Leaf, piece: Piece) -> Tensor:
        some, first = own[number].reshape(-1), SIGNS * spans[number].start
        if piece.shape == leaf.shape:
            bits = some.unsqueeze(1) >> torch.arange(32, dtype=torch.int32, device=device)
            bits = bits.reshape(-1)[piece.start - first :][: piece.numel]
        else:
            index = global_index(leaf.shape, piece, device)
            bits = some.take(index >> 5) >> (index & 31)
        return (bits & 1).to(leaf.dtype).mul_(2).sub_(1)

    return draw


def _span(leaf: Leaf, piece: Piece, size: int) -> range:
    """The counters of a piece's signs among those of its leaf; all of them for a piece that is no run."""
    if not leaf.trainable or not piece.numel:
        return range(0)
    return range(piece.start // SIGNS, -(-piece.stop // SIGNS)) if piece.shape == leaf.shape else range(size)


def _piece(plan: Plan, path: str) -> Piece:
    """This rank's piece of a leaf; all of it where the caller stands for all ranks."""
    leaf = plan.leaves[path]
    if plan.mesh.everywhere:
        return Piece((0,) * len(leaf.shape), leaf.shape, 0, math.prod(leaf.shape))
    group, at = plan.places()[path]
    return group.piece(at, plan.mesh)


def _drawn(key: Tensor, plan: Plan, prepare: Callable[[], Draw]) -> dict[str, Any]:
    """A tree of shards whose trainable leaves are drawn."""
    random.check_key(key)
    expect_plan("a random tree (key, plan)", plan)
    out, draw = dict[str, Tensor](), prepare()
    for number, (path, leaf) in enumerate(plan.leaves.items()):
        group, at = plan.places()[path]
        local = leaf.shape if plan.mesh.everywhere else group.local_shape(at, plan.mesh)
        if leaf.trainable:
            out[path] = draw(number, leaf, _piece(plan, path)).view(local)
        else:
            out[path] = torch.zeros(local, dtype=leaf.dtype, device=plan.mesh.device)
    made = tree.nest(out)
    know_shards(made, plan)
    return made
