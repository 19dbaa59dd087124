"""The transforms that are under way at a call: those of ``torch.func``, and plain autograd."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.torch_internals import (
    DisableTorchFunctionSubclass,
    forward_ad_level,
    functorch,
    peek_interpreter_stack,
    vmap_size,
)

AUTOGRAD = 0
"""The level of plain autograd, outside of all transforms of ``torch.func``, whose levels begin at 1."""


def under_way(tensors: list[Tensor]) -> bool:
    """Tell whether a transform runs, or autograd records operations on these tensors."""
    if peek_interpreter_stack() is not None:
        return True
    with DisableTorchFunctionSubclass():  # leaves of a step under way answer in Python, each time
        if torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors]):
            return True
    level = forward_ad_level()
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    return level >= 0 and any(unpack(tensor).tangent is not None for tensor in tensors)


def derivatives_of(leaves: Mapping[str, Tensor], others: Sequence[Any]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The transforms around a call, if each is taken by leaves and by no other values, and these leaves.

    Returns:
        The names of the transforms, the outermost first, and the paths of all leaves that any is taken by; nothing
        where there is none, or one is taken by other values.
    """
    stack = functorch.get_interpreter_stack() or ()
    found = {path: at for path, leaf in leaves.items() if (at := levels(leaf))}
    if set[int]().union(*found.values()) != {int(level.level()) for level in stack}:
        return (), frozenset()
    if any(levels(x) for x in others if isinstance(x, Tensor)):
        return (), frozenset()
    return tuple(map(_name, stack)), frozenset(found)


def transforms_text(params: Any, batch: Any) -> str:
    """The transforms around a call, the outermost first, and what each is taken by; empty where there is none.

    Equal on two ranks if both differentiate and batch the same values of it in the same way: else they would make other
    collectives.

    >>> found = []
    >>> _ = torch.func.grad(lambda p: found.append(transforms_text({"w": p}, ())) or p)(torch.tensor(1.0))
    >>> found
    ['under grad by w']
    """
    leaves = dict(tree.paths(params)) if isinstance(params, Mapping) else {}
    found = {path: levels(leaf) for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    of_batch = set[int]().union(*[levels(x) for x in tree.leaves(batch) if isinstance(x, Tensor)])
    names = {int(level.level()): _name(level) for level in functorch.get_interpreter_stack() or ()}
    if AUTOGRAD in of_batch.union(*found.values()):
        names = {AUTOGRAD: "torch.autograd", **names}
    by = {level: [path for path, at in found.items() if level in at] for level in names}
    parts = [f"{name} by {_words(by[level], level in of_batch)}" for level, name in names.items()]
    return f"under {', '.join(parts)}" if parts else ""


def _words(paths: list[str], batch: bool) -> str:
    """Leaves, and maybe the batch, in words."""
    more = f" and {len(paths) - 1} more leaves" if len(paths) > 1 else ""
    what = [f"{path}{more}" for path in paths[:1]] + ["the batch"] * batch
    return " and ".join(what) or "other values"


def levels(x: Tensor) -> set[int]:
    """The levels of the transforms that a tensor takes part in."""
    out = set[int]()
    kinds = {level.level(): level.key() for level in functorch.get_interpreter_stack() or ()}
    while functorch.is_functorch_wrapped_tensor(x):
        level = int(functorch.maybe_get_level(x))
        kind = kinds.get(level)  # none of a transform that is over
        # Reverse derivatives wrap all arguments, and mark those that they are taken by.
        if kind is not None and (kind != functorch.TransformType.Grad or x.requires_grad):
            out.add(level)
        x = functorch.get_unwrapped(x)
    with DisableTorchFunctionSubclass():
        recorded = torch.is_grad_enabled() and x.requires_grad
    return out | {AUTOGRAD} if recorded else out


def _name(level: Any) -> str:
    kind = level.key()
    if kind == functorch.TransformType.Vmap:
        return f"vmap of {vmap_size(level)}"
    return {functorch.TransformType.Grad: "grad", functorch.TransformType.Jvp: "jvp"}.get(kind, str(kind))
