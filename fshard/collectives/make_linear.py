"""Check the arguments of a collective, and build its linear map."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fshard.arguments import kind
from fshard.collectives.linear import Collect, Gather, LinearExchange, LinearRagged, Permute, Scatter
from fshard.collectives.ranks import Ranks
from fshard.collectives.scope import SCOPE, cutting
from fshard.collectives.ties import applied
from fshard.errors import CollectiveError, lines
from fshard.sharding.mesh import Mesh
from fshard.torch_internals import untraced_by_dynamo

Args = ParamSpec("Args")
Result = TypeVar("Result")


def untraced(fn: Callable[Args, Result]) -> Callable[Args, Result]:
    """Let torch.compile break its graph here, without importing Dynamo, as ``torch.compiler.disable`` does.

    Where no scope does it, an exception ends the waits of other ranks in the collective.
    """

    @functools.wraps(fn)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        mesh = kwargs.get("mesh")
        if SCOPE.get() is not None or not isinstance(mesh, Mesh):
            return fn(*args, **kwargs)
        with cutting(mesh):
            return fn(*args, **kwargs)

    return untraced_by_dynamo(call)


def gather(x: Tensor, group: Ranks, dim: int, tiled: bool, invariant: bool) -> Tensor:
    """All ranks' tensors, stacked or concatenated."""
    kind_of = Collect if invariant else Gather
    if tiled:
        return applied(x, kind_of(group, dim_of(x, dim, "all_gather")))
    at = dim_of(x, dim, "all_gather", 1)
    return applied(x.unsqueeze(x.dim() + 1 + at), kind_of(group, at))


def scatter_op(x: Tensor, group: Ranks, dim: int, tiled: bool, what: str) -> Scatter:
    """This rank's slice of the sum."""
    check_addable(x, what)
    at = dim_of(x, dim, what)
    check_divides(x, at, group, tiled, what)
    return Scatter(group, at)


def exchange_op(x: Tensor, group: Ranks, split: int, concat: int, tiled: bool, what: str) -> LinearExchange:
    """Cut along one dim, join along another."""
    at = dim_of(x, split, what)
    check_divides(x, at, group, tiled, what)
    return LinearExchange(group, at, dim_of(x, concat, what))


def exchange(x: Tensor, op: LinearExchange, tiled: bool) -> Tensor:
    """Cut along one dim, join along another, which is a new one if not ``tiled``."""
    if tiled:
        return applied(x, op)
    # The result loses the split dim and gains a new one, so it has as many dims as x.
    front = x.movedim(op.split, 0).unsqueeze(x.dim() + op.concat + 1)
    return applied(front, LinearExchange(op.group, -front.dim(), op.concat)).squeeze(0)


def ragged(x: Tensor, group: Ranks, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows to ranks in unequal numbers."""
    for what, numbers in (("send", send), ("receive", receive)):
        listed = list(numbers) if isinstance(numbers, Sequence) else []
        if len(listed) != group.size or any(not isinstance(n, int) or n < 0 for n in listed):
            raise CollectiveError(
                f"ragged_all_to_all: {what}={numbers!r} must be one int >= 0 for each of the {group.size} ranks of "
                f"axis {str(group)!r}"
            )
    if x.dim() < 2 or x.shape[-2] != sum(send):
        raise CollectiveError(
            f"ragged_all_to_all: send={list(send)} are {sum(send)} rows, and a tensor of shape {list(x.shape)} must "
            f"have as many in the dim before its last one"
        )
    return applied(x, LinearRagged(group, tuple(send), tuple(receive)))


def permute(group: Ranks, perm: Sequence[tuple[int, int]]) -> Permute:
    """Send from sources to targets."""
    try:
        pairs = tuple((int(source), int(target)) for source, target in perm)
    except (TypeError, ValueError):
        raise CollectiveError(f"ppermute: perm={perm!r} must be a list of (source, target) pairs of ints") from None
    problems = []
    for what, ends in (("source", [s for s, _ in pairs]), ("target", [t for _, t in pairs])):
        problems += [f"{what} {end} occurs {ends.count(end)} times" for end in sorted(set(ends)) if ends.count(end) > 1]
        problems += [f"{what} {end} is not in 0..{group.size - 1}" for end in ends if not 0 <= end < group.size]
    if problems:
        head = f"ppermute over {str(group)!r}, of size {group.size}, with perm={list(pairs)}:"
        raise CollectiveError(lines(head, problems, "Name each source and each target once; others get zeros."))
    return Permute(group, pairs)


def dim_of(x: Tensor, dim: int, what: str, more: int = 0) -> int:
    """A dim of a tensor with ``more`` dims than this one, counted from the end."""
    tensor(x, what)
    if not isinstance(dim, int):
        raise CollectiveError(f"{what}: dim={dim!r} is {kind(dim)}: give the number of a dim")
    count = x.dim() + more
    if not -count <= dim < count:
        raise CollectiveError(f"{what}: dim={dim} of a tensor of shape {list(x.shape)}, which has {count - more} dims")
    return dim - count if dim >= 0 else dim


def check_divides(x: Tensor, dim: int, group: Ranks, tiled: bool, what: str) -> None:
    """Refuse a dim that cannot be divided over the ranks."""
    size = x.shape[dim]
    if tiled and size % group.size:
        raise CollectiveError(
            f"{what}: dim {x.dim() + dim} of shape {list(x.shape)} has {size} elements, which axis {str(group)!r} of "
            f"size {group.size} does not divide: pad it to {-(-size // group.size) * group.size}"
        )
    if not tiled and size != group.size:
        raise CollectiveError(
            f"{what}: dim {x.dim() + dim} of shape {list(x.shape)} has {size} elements, and axis {str(group)!r} has "
            f"{group.size} ranks: they must be equal, or use tiled=True, which keeps the dim"
        )


def check_addable(x: Tensor, what: str) -> None:
    """Refuse bools."""
    tensor(x, what)
    if x.dtype == torch.bool:
        raise CollectiveError(f"{what} of bools: cast them, x.int() to count, x.any() or pmax for a logical or")


def tensor(x: Any, what: str) -> Tensor:
    """The value, if it is a tensor."""
    if not isinstance(x, Tensor):
        raise CollectiveError(f"{what} takes tensors, not {type(x).__name__}: wrap numbers by torch.tensor")
    return x


def number(leaf: Any, what: str) -> Any:
    """The value, if it is a Python number."""
    if isinstance(leaf, bool) or not isinstance(leaf, int | float | complex):
        raise CollectiveError(f"{what} takes tensors and numbers, not {type(leaf).__name__}")
    return leaf
