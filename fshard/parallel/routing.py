"""Routing of tokens to experts, and two losses for routers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fshard import collectives
from fshard.arguments import expect
from fshard.collectives.scope import AxisName
from fshard.errors import PlanError
from fshard.sharding.mesh import Mesh


@dataclass(frozen=True)
class Routing:
    """The experts of each token. Made by ``route``.

    Attributes:
        weights: (..., k) floating, the factor on each choice's result.
        chosen: (..., k) int64, the numbers of the experts, the best first.
        probs: (..., experts) float32, the router's probabilities, for the losses.

    >>> routing = fs.parallel.route(torch.tensor([[1.0, 3.0, 2.0]]), k=1)
    >>> routing.experts, routing.chosen, routing.weights
    (3, tensor([[1]]), tensor([[1.]]))
    """

    weights: Tensor
    chosen: Tensor
    probs: Tensor

    @property
    def experts(self) -> int:
        """The number of experts on all ranks together."""
        return self.probs.shape[-1]


def route(logits: Tensor, k: int = 2, *, normalize: bool = True) -> Routing:
    """Send each token to the ``k`` experts of the largest logits (Shazeer et al. 2017).

    Args:
        logits: (..., experts), the router's; probabilities are taken in float32 or better.
        k: experts a token.
        normalize: let the weights of a token's choices add up to 1 (Mixtral). Otherwise they are probabilities over all
            experts (Switch), which give the router a gradient with ``k=1``.

    Raises:
        PlanError: ``k`` is not between 1 and the number of experts.

    >>> routing = fs.parallel.route(torch.tensor([[1.0, 3.0, 2.0]]), k=2)
    >>> routing.chosen, routing.weights
    (tensor([[1, 2]]), tensor([[0.7311, 0.2689]]))
    """
    expect("route(logits, k)", [("logits", logits, Tensor, "a tensor"), ("k", k, int, "experts a token")])
    if not 1 <= k <= logits.shape[-1]:
        raise PlanError(f"route: k={k} of {logits.shape[-1]} experts: choose from 1 to {logits.shape[-1]}")
    probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    weights, chosen = probs.topk(k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(weights, chosen, probs)


def load_balance_loss(routing: Routing, *, axis: AxisName | None = None, mesh: Mesh | None = None) -> Tensor:
    """A measure of uneven routing: 1 at best, the number of experts at worst (Switch Transformer: Fedus et al. 2021,
    equation 4; a token of several choices counts once for each).

    It is ``experts * sum(f * p)``, with ``f`` the part of choices that an expert got, which has no gradient, and ``p``
    its mean probability. Add a hundredth of it to the loss.

    Args:
        routing: of any number of tokens.
        axis: the data axes, to take ``f`` and ``p`` over the tokens of all their ranks, which must have equally many.
            Then the loss, and its gradient, are those of one process on the global batch. None takes each rank's own.
        mesh: where to look the axes up, if not on the mesh in scope.

    >>> even, crowded = torch.eye(4) * 99, torch.tensor([[99.0, 0, 0, 0]] * 4)
    >>> [fs.parallel.load_balance_loss(fs.parallel.route(logits, k=1)) for logits in (even, crowded)]
    [tensor(1.), tensor(4.)]
    """
    expect("load_balance_loss(routing)", [("routing", routing, Routing, "what fs.parallel.route(logits) returned")])
    probs = routing.probs.reshape(-1, routing.experts)
    chosen = routing.chosen.reshape(-1)
    got = probs.new_zeros(routing.experts).scatter_add(0, chosen, probs.new_ones(chosen.shape)) / chosen.numel()
    table = torch.stack((got, probs.mean(0)))
    if axis is not None:
        table = collectives.pmean(table, axis, mesh=mesh)
    return (routing.experts * table[0].detach() * table[1]).sum()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the logits' logsumexp, which keeps them small (ST-MoE: Zoph et al. 2022, equation 5). Add a
    thousandth of it to the loss.

    Args:
        logits: (..., experts).

    >>> fs.parallel.z_loss(torch.zeros(3, 4))  # log(4) squared
    tensor(1.9218)
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1).square().mean()
