"""The sum of a head's losses by chunks of rows: gradients together with the loss, or computed again.

In plain autograd one pass over the rows computes the loss and its gradients by hidden states, weights and bias, and
the backward scales them. Everything else, a transform of torch.func, forward-mode differentiation, a second
derivative, takes the same sum by ``fs.remat``, chunk by chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fshard import collectives
from fshard.collectives.scope import resolve
from fshard.losses.head_rows import HeadLoss, Parts
from fshard.model.remat_function import remat
from fshard.torch_internals import forward_ad_level, functorch


@dataclass(frozen=True)
class ChunkedHead:
    """A head's loss over chunks of rows.

    Attributes:
        loss: its options.
        chunks: the number of chunks.
    """

    loss: HeadLoss
    chunks: int

    def total(self, hiddens: Parts, weights: Parts, bias: Tensor | None, labels: Tensor) -> Tensor:
        """The sum of the losses of all rows."""
        tensors = [*hiddens, *weights, *([] if bias is None else [bias])]
        if self._in_one_pass(tensors):
            return OnePass.apply(self, len(hiddens), labels, *tensors)  # type: ignore[no-untyped-call, no-any-return]
        return self.again(hiddens, weights, bias, labels).sum()

    def again(self, hiddens: Parts, weights: Parts, bias: Tensor | None, labels: Tensor) -> Tensor:
        """The loss of each row; every derivative computes the logits of a chunk again."""
        dual = _dual([*hiddens, *weights, *([] if bias is None else [bias])])  # remat has no rule for these
        rows = self.loss.losses if dual else remat(self.loss.losses)
        size = self.rows(labels)
        cut = [torch.split(each, size) for each in (*hiddens, labels)]
        found = [rows([*some], [*weights], bias, own) for *some, own in zip(*cut, strict=True)]
        return torch.cat(found)

    def rows(self, labels: Tensor) -> int:
        """The rows of a chunk; the last may have fewer."""
        return -(-labels.shape[0] // self.chunks)

    def _in_one_pass(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether gradients come with the loss.

        In float16 they would overflow or vanish before the scale of the loss reached them. Inside of ``fs.shard_map``
        every value is varying, so the gradient of each rank's loss has parts of all ranks.
        """
        plain = functorch.peek_interpreter_stack() is None and not _dual(tensors)
        axis = self.loss.axis
        varying = axis is not None and resolve(axis, self.loss.mesh).implicit
        return plain and not varying and all(each.dtype != torch.float16 for each in tensors)


class OnePass(torch.autograd.Function):
    """``OnePass.apply(head, number of pairs, labels, *hiddens, *weights, [bias])``: the sum of the losses.

    The gradients belong to the node. The first backward scales them where they are and gives them away; later ones,
    and those that need a graph, compute the logits again.
    """

    @staticmethod
    def forward(ctx: Any, head: ChunkedHead, count: int, labels: Tensor, *tensors: Tensor) -> Tensor:
        ctx.head, ctx.count = head, count
        ctx.save_for_backward(labels, *tensors)
        wanted = [*ctx.needs_input_grad[3:]]
        total, ctx.grads = _pass(head, count, labels, tensors, wanted)
        return total

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        scale, grads = given[0], ctx.grads
        if grads is None or torch.is_grad_enabled():
            return None, None, None, *_again(ctx, scale)
        ctx.grads = None
        return None, None, None, *(None if grad is None else grad.mul_(scale) for grad in grads)


def _pass(
    head: ChunkedHead, count: int, labels: Tensor, tensors: Parts, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of the losses, and the gradients that are wanted."""
    hiddens, weights, bias = tensors[:count], tensors[count : 2 * count], next(iter(tensors[2 * count :]), None)
    totals, slopes_of = [], HeadGradients(count, wanted)
    for *some, own in zip(*(torch.split(each, head.rows(labels)) for each in (*hiddens, labels)), strict=True):
        if not any(wanted):
            totals.append(head.loss.losses(some, weights, bias, own).sum())
            continue
        total, slopes = head.loss.derived(some, weights, bias, own)
        totals.append(total)
        slopes_of.add(slopes, some, weights)
        del slopes
    return torch.stack(totals).sum(), slopes_of.found(head.loss, tensors)


class HeadGradients:
    """The gradients of a pass, chunk by chunk.

    Args:
        count: the number of pairs of hidden states and weights.
        wanted: of which tensors: hidden states, weights, and the bias if there is one.
    """

    def __init__(self, count: int, wanted: Sequence[bool]) -> None:
        self.count, self.wanted = count, wanted
        self.by_rows: list[list[Tensor]] = [[] for _ in range(count)]
        self.summed: list[Tensor | None] = [None] * (len(wanted) - count)

    def add(self, slopes: Tensor, hiddens: Parts, weights: Parts) -> None:
        """Add those of a chunk, from the derivative of its losses by its logits."""
        for place, (hidden, weight) in enumerate(zip(hiddens, weights, strict=True)):
            if self.wanted[place]:
                self.by_rows[place].append(torch.mm(slopes, weight))
            if self.wanted[self.count + place]:
                before = self.summed[place]
                new = torch.mm(slopes.t(), hidden) if before is None else before.addmm_(slopes.t(), hidden)
                self.summed[place] = new
        if self.wanted[2 * self.count :] == [True]:
            before = self.summed[self.count]
            new = slopes.sum(0, dtype=torch.promote_types(slopes.dtype, torch.float32))
            self.summed[self.count] = new if before is None else before.add_(new)

    def found(self, loss: HeadLoss, tensors: Parts) -> list[Tensor | None]:
        """All of them, None where none was wanted. Those by hidden states are sums over the ranks of the axis."""
        rows = [torch.cat(each) if each else None for each in self.by_rows]
        if loss.axis is not None:
            rows = [None if each is None else collectives.psum(each, loss.axis, mesh=loss.mesh) for each in rows]
        sums = zip(self.summed, tensors[self.count :], strict=True)
        return [*rows, *(None if each is None else each.to(tensor.dtype) for each, tensor in sums)]


def _dual(tensors: Parts) -> bool:
    """Tell whether any has a tangent of plain autograd. On played ranks a level is open that has none."""
    if forward_ad_level() < 0 or functorch.peek_interpreter_stack() is not None:
        return False
    unpacked = [forward_ad.unpack_dual(each) for each in tensors]  # type: ignore[no-untyped-call]
    return any(each.tangent is not None for each in unpacked)


def _again(ctx: Any, scale: Tensor) -> list[Tensor | None]:
    """The gradients by a second pass, with a graph where one is asked for."""
    labels, *tensors = ctx.saved_tensors
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad[3:]) if needed]
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = tensors if graph else [each.detach().requires_grad_(each.requires_grad) for each in tensors]
        hiddens, weights = given[: ctx.count], given[ctx.count : 2 * ctx.count]
        total = ctx.head.again(hiddens, weights, next(iter(given[2 * ctx.count :]), None), labels).sum()
        found = torch.autograd.grad(total, [given[i] for i in wanted], scale, create_graph=graph)
    by = dict(zip(wanted, found, strict=True))
    return [by.get(i) for i in range(len(tensors))]
