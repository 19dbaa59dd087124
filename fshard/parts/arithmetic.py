"""Arithmetic on trees of shards: one kernel a group where the tree knows its chunks, else one call for all leaves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import TreeError
from fshard.state.elementwise import ALIKE_REMEDY
from fshard.state.flat import Flat, cut_of_leaf, each_chunk, known_flat

Number = float | Tensor
"""A number, or a 0-dim tensor that is equal on all ranks."""


def add(x: Any, y: Any, alpha: Number = 1.0) -> Any:
    """``x + alpha * y``, leaf by leaf. Local.

    Args:
        x: a tree of tensors, such as ``state.params`` or gradients.
        y: a tree like it. Leaves of ``x`` that it lacks keep their values.
        alpha: a number, or a 0-dim tensor such as ``fs.tree.norm`` returns.

    Returns:
        A new tree like ``x``.

    Raises:
        TreeError: ``y`` has leaves that ``x`` has not, or of other shapes, or cut at other elements, as those of
            another subtree of one model can be.

    >>> fs.tree.add({"w": torch.ones(2)}, {"w": torch.ones(2)}, alpha=-0.5)
    {'w': tensor([0.5000, 0.5000])}
    """
    left, right = known_flat(x), known_flat(y)
    if left is not None and right is not None and _covers(left, right):
        added = right.chunks

        def one(group: int, chunk: Tensor) -> Tensor:
            return _plus(chunk, added[group], alpha) if group in added else chunk.clone()

        with torch.no_grad():
            return left.made({group: one(group, chunk) for group, chunk in left.chunks.items()}).tree()
    mine, theirs = _paths("x", x), _paths("y", y)
    _check_cuts(mine, theirs)
    wrong = [path for path, leaf in theirs.items() if path not in mine or mine[path].shape != leaf.shape]
    if wrong:
        raise TreeError(
            f"fs.tree.add(x, y): y has leaves that x has not, or not in that shape: {', '.join(wrong[:4])}. Give trees "
            f"of one plan"
        )
    flat = {path: _plus(leaf, theirs[path], alpha) if path in theirs else leaf.clone() for path, leaf in mine.items()}
    return tree.nest(flat)


def scale(x: Any, alpha: Number) -> Any:
    """``alpha * x``, leaf by leaf. Local.

    Args:
        x: a tree of tensors.
        alpha: a number, or a 0-dim tensor such as ``fs.tree.norm`` returns.

    >>> fs.tree.scale({"w": torch.ones(2)}, 3.0)
    {'w': tensor([3., 3.])}
    """
    return _each(x, lambda leaf: leaf * alpha)


def _each(x: Any, call: Callable[[Tensor], Tensor]) -> Any:
    flat = known_flat(x)
    if flat is not None:
        return flat.made(each_chunk(call, flat)).tree()
    return tree.nest({path: call(leaf) for path, leaf in _paths("x", x).items()})


def _plus(x: Tensor, y: Tensor, alpha: Number) -> Tensor:
    """The sum, where ``x`` lies: parameters may be in host memory, and their gradients on the device."""
    if isinstance(alpha, Tensor):
        return torch.addcmul(x, y.to(x.device), alpha.to(x.device, x.dtype))
    return torch.add(x, y.to(x.device, x.dtype), alpha=alpha)


def _check_cuts(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Refuse leaves of two trees that are known to be cut at different elements."""
    for path in mine.keys() & theirs.keys():
        one, other = cut_of_leaf(mine[path]), cut_of_leaf(theirs[path])
        if one is not None and other is not None and one != other:
            raise TreeError(
                f"fs.tree.add(x, y): the leaves {one.path} and {other.path} are cut at different elements, so elements "
                f"of one rank do not belong together. {ALIKE_REMEDY}"
            )


def _covers(left: Flat, right: Flat) -> bool:
    """Tell whether chunks of these trees can be added: the other has no leaf that this one has not."""
    mine, theirs = left.form, right.form
    return mine.plan.mesh is theirs.plan.mesh and (
        mine.order.paths == theirs.order.paths or set(theirs.order.paths) <= set(mine.order.paths)
    )


def _paths(name: str, given: Any) -> dict[str, Tensor]:
    if not isinstance(given, dict):
        raise TreeError(f"{name} is {described(given)}, not a nested dict of tensors")
    return dict(tree.paths(given))
