"""Sequences cut over ranks so that each has equal work in causal attention (context parallelism).

Of a sequence in ``2 * ranks`` chunks, rank ``i`` has chunk ``i`` and chunk ``2 * ranks - 1 - i``: an early and a late
one. Later tokens attend to more tokens, so the work is equal ("The Llama 3 Herd of Models", Dubey et al. 2024;
Striped Attention, Brandon et al. 2023, deals single tokens out instead).
"""

import torch
from torch import Tensor

from fshard import collectives
from fshard.arguments import expect
from fshard.collectives.scope import AxisName
from fshard.errors import PlanError
from fshard.sharding.mesh import Mesh


def zigzag(x: Tensor, parts: int, dim: int = 1) -> Tensor:
    """A sequence reordered so that equal slices of it are the ranks' parts.

    Args:
        x: the whole sequence along ``dim``.
        parts: the number of ranks that share it.
        dim: the dim of the sequence.

    Raises:
        PlanError: its length is not a multiple of ``2 * parts``.

    >>> fs.parallel.zigzag(torch.arange(8), 2, 0)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    _expect("zigzag", x)
    return _dealt(x, _order(x.shape[dim], parts), dim)


def unzigzag(x: Tensor, parts: int, dim: int = 1) -> Tensor:
    """The inverse of ``zigzag``.

    Args:
        x: a whole sequence in the order that ``zigzag`` gave it.
        parts: the ranks along the axis of the sequence.
        dim: the dim of the sequence.

    >>> fs.parallel.unzigzag(fs.parallel.zigzag(torch.arange(8), 2, 0), 2, 0)
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    _expect("unzigzag", x)
    order = _order(x.shape[dim], parts)
    return _dealt(x, sorted(range(len(order)), key=order.__getitem__), dim)


def zigzag_slice(x: Tensor, dim: int = 1, *, axis: AxisName = "cp", mesh: Mesh | None = None) -> Tensor:
    """This rank's part of a whole sequence: a copy without derivative, for batches.

    Args:
        x: the whole sequence along ``dim``, such as tokens (batch, time).
        dim: the dim of the sequence.
        axis: the context-parallel axis, or both of them, the ring's first.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        PlanError: its length is not a multiple of twice the size of the axis.

    >>> mesh = fs.virtual_mesh((2,), ("cp",))
    >>> mesh.run(lambda: fs.parallel.zigzag_slice(torch.arange(8), 0, mesh=mesh))
    [tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5])]
    """
    parts, index = collectives.axis_size(axis, mesh=mesh), collectives.axis_index(axis, mesh=mesh)
    return zigzag(x.detach(), parts, dim).chunk(parts, dim)[index].clone()


def zigzag_positions(length: int, *, axis: AxisName = "cp", device: object = None, mesh: Mesh | None = None) -> Tensor:
    """The positions of this rank's tokens in the whole sequence, for position embeddings.

    Args:
        length: the number of this rank's tokens.
        axis: the context-parallel axis, or both of them, the ring's first.
        device: of the result.
        mesh: where to look the axis up, if not on the mesh in scope.

    Returns:
        (length,) int64.

    Raises:
        PlanError: the length is odd.

    >>> mesh = fs.virtual_mesh((2,), ("cp",))
    >>> mesh.run(lambda: fs.parallel.zigzag_positions(2, mesh=mesh))
    [tensor([0, 3]), tensor([1, 2])]
    """
    parts, index = collectives.axis_size(axis, mesh=mesh), collectives.axis_index(axis, mesh=mesh)
    _order(length * parts, parts)
    half = length // 2
    early, late = index * half, (2 * parts - 1 - index) * half
    chunks = [torch.arange(start, start + half, device=device) for start in (early, late)]  # type: ignore[call-overload]
    return torch.cat(chunks)


def _expect(call: str, x: Tensor) -> None:
    expect(f"{call}(x, parts)", [("x", x, Tensor, "a tensor with a dim that is the sequence")])


def _dealt(x: Tensor, order: list[int], dim: int) -> Tensor:
    """Its chunks in another order. An index would be copied to the device, which waits for it."""
    chunks = x.tensor_split(len(order), dim)
    return torch.cat([chunks[at] for at in order], dim)


def _order(length: int, parts: int) -> list[int]:
    """The places, in a whole sequence of ``2 * parts`` chunks, of the ranks' chunks, one rank after the other."""
    expect("a zigzag", [("parts", parts, int, "the number of ranks"), ("length", length, int, "how many tokens")])
    if parts < 1:
        raise PlanError(f"parts={parts}: give the number of ranks, at least 1")
    if length % (2 * parts):
        raise PlanError(
            f"a sequence of {length} tokens over {parts} ranks: each has two chunks of equal length, so it must be a "
            f"multiple of 2 * {parts} = {2 * parts}; pad it to {-(-length // (2 * parts)) * 2 * parts}"
        )
    return [at for i in range(parts) for at in (i, 2 * parts - 1 - i)]
