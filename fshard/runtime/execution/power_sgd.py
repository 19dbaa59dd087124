"""Sums over replicas of matrices as products of two narrow ones: PowerSGD (Vogels et al., 2019), one step at a time.

Each replica has a matrix ``M``: its part of a gradient, and what is left of it from the sums before. All of them have
an equal basis ``Q``, the second factor of the last product. The sum of ``M Q`` travels, and is made orthonormal; the
sum of ``M^T P`` with that is the new ``Q``; and the sum is taken to be ``P Q^T``. That is one step of a power iteration
for the largest singular vectors, which begins where the one before has ended. What a replica's own ``P Q^T`` lacks of
its ``M`` is left for the next sum. ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`` does so for DDP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.runtime.comm import Done, Handle
from fshard.runtime.execution.wires import Residual
from fshard.sharding.low_rank import Matrix, gaps_of

SAME = 1e-5
"""A column that keeps no more than this share of its length is a combination of the columns before it."""


@dataclass(frozen=True)
class Basis:
    """The second factors of a group's products.

    Attributes:
        before: the factors of the previous products, which do not change.
        after: memory for the factors of these products.
        found: the matrices in the shard.
        rank: of the products.
    """

    before: Tensor
    after: Tensor
    found: Sequence[Matrix]
    rank: int

    def cut(self, buffer: Tensor, one: Matrix) -> Tensor:
        """The part of a buffer that belongs to a matrix, ``(cols, rank)``."""
        return buffer[one.basis : one.basis + one.cols * self.rank].view(one.cols, self.rank)


def orthonormal(columns: Tensor) -> Tensor:
    """Columns of length 1 that are orthogonal to each other, and span the same; 0 for one that depends on others.

    >>> orthonormal(torch.tensor([[3.0, 3.0, 0.0], [4.0, 4.0, 5.0]])).mul(10).round()
    tensor([[ 6.,  0., -8.],
            [ 8.,  0.,  6.]])
    """
    out = columns.clone()
    size = torch.linalg.vector_norm(columns, dim=0)
    for number in range(out.shape[1]):
        column, rest = out[:, number : number + 1], out[:, number + 1 :]
        length = torch.linalg.vector_norm(column)
        column.mul_(torch.where(length > SAME * size[number], 1 / length, 0.0))
        rest.sub_(column @ (column.T @ rest))
    return out


@dataclass(eq=False)
class Product:
    """The handle of a sum. Its first message, ``first``, holds the first factors and all that is exact.

    Attributes:
        work: the handle of the first message.
        first: what it holds.
        own: this rank's part of the gradient, which becomes the sum.
        residual: what is left of its matrices.
        basis: the second factors.
        add: starts an exact sum of a tensor over replicas, in place.
        second: the handle of the second message and what it holds; None until ``advance``.
        firsts: the first factors of the sum, from then on.
    """

    work: Handle
    first: Tensor
    own: Tensor
    residual: Residual
    basis: Basis
    add: Callable[[Tensor], Handle]
    second: tuple[Handle, Tensor] | None = None
    firsts: Sequence[Tensor] = ()

    def advance(self) -> None:
        """Wait for the first factors, and start to exchange the second ones. Does nothing if it was called before.

        What is left is known then: what this rank's own product lacks.
        """
        if self.second is not None:
            return
        self.work.wait()
        basis, left = self.basis, self.residual.after
        basis.after.copy_(basis.before)
        at = 0
        for begin, end in gaps_of([*basis.found], self.own.numel()):
            self.own[begin:end] = self.first[at : at + end - begin]
            left[begin:end].zero_()
            at += end - begin
        firsts, seconds = [], []
        for one in basis.found:
            whole = left[one.begin : one.end].view(one.rows, one.cols)
            firsts.append(orthonormal(self.first[at : at + one.rows * basis.rank].view(one.rows, basis.rank)))
            seconds.append(whole.T @ firsts[-1])
            whole.sub_(firsts[-1] @ seconds[-1].T)
            at += one.rows * basis.rank
        self.firsts, factors = firsts, torch.cat([self.first[:0], *(second.reshape(-1) for second in seconds)])
        self.second = self.add(factors) if basis.found else Done(), factors

    def wait(self) -> None:
        """Wait for the second factors, and multiply."""
        self.advance()
        assert self.second is not None
        (work, seconds), basis, at = self.second, self.basis, 0
        work.wait()
        for one, first in zip(basis.found, self.firsts, strict=True):
            second = seconds[at : at + one.cols * basis.rank].view(one.cols, basis.rank)
            self.own[one.begin : one.end].view(one.rows, one.cols).copy_(first @ second.T)
            kept = basis.cut(basis.after, one)  # a column of zeros would never become another
            kept.copy_(torch.where(torch.linalg.vector_norm(second, dim=0) > 0, second, kept))
            at += one.cols * basis.rank


def low_rank_sum(own: Tensor, residual: Residual, basis: Basis, add: Callable[[Tensor], Handle]) -> Product:
    """Start a sum over replicas, in place, of which matrices are taken as products of low rank.

    Args:
        own: this rank's part, 1-D.
        residual: what is left of its matrices.
        basis: the second factors.
        add: starts an exact sum of a tensor over replicas, in place.
    """
    left = residual.added(own)
    parts = [left[begin:end] for begin, end in gaps_of([*basis.found], own.numel())]
    for one in basis.found:
        whole = left[one.begin : one.end].view(one.rows, one.cols)
        parts.append((whole @ orthonormal(basis.cut(basis.before, one))).view(-1))
    first = torch.cat(parts)
    return Product(add(first), first, own, residual, basis, add)
