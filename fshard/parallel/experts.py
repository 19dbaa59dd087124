"""Tokens to experts that live on other ranks, and back (expert parallelism: GShard, Lepikhin et al. 2020).

Each rank has its own tokens and some of the experts. One all-to-all sends tokens to the ranks of their experts, another
one sends results back; experts are never gathered over the axis. In the backward, the gradients of a rank's experts
come from the tokens of all ranks along the axis, so they are sums already and need no reduction over it. Each rank's
backward starts from one over the number of data ranks, so their scale is that of all other gradients.

**Capacity**: each expert takes a fixed number of a group's tokens, first choices first; further tokens are dropped and
give zero. Shapes are static. The group is a sequence, so the dropped tokens do not depend on the mesh.
**Dropless**: every choice is sent, in unequal numbers, which the host reads once a layer (MegaBlocks: Gale et al.
2022).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.parallel.plan_checks import EXPERTS, check_cut, check_data_axis, divided, path_of
from fshard.parallel.ragged import Ragged, Slotted, dispatch_ragged, dispatch_slots
from fshard.parallel.routing import Routing
from fshard.sharding.mesh import Mesh

_ROUTING = "what fs.parallel.route(logits) returned"


@dataclass(frozen=True)
class Dispatched:
    """Tokens at their experts. Made by ``dispatch``.

    Attributes:
        rows: (n, width): the rows for this rank's experts, expert by expert.
        counts: the number of rows of each of them.
        way: the way back, for ``combine``.

    >>> routing = fs.parallel.route(torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]), k=1)
    >>> fs.parallel.dispatch(torch.tensor([[1.0], [2.0], [3.0]]), routing, axis=None).counts
    (2, 1)
    """

    rows: Tensor
    counts: tuple[int, ...]
    way: Slotted | Ragged


def dispatch(
    x: Tensor,
    routing: Routing,
    *,
    axis: str | None = "ep",
    capacity: float | None = None,
    mesh: Mesh | None = None,
) -> Dispatched:
    """Send tokens to their experts.

    Args:
        x: (groups, tokens, width), or (tokens, width) for one group: this rank's tokens.
        routing: of these tokens.
        axis: the expert-parallel axis; None if every rank has all experts.
        capacity: the choices of a group that an expert takes, as a multiple of its even share; None drops nothing.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        PlanError: the axis does not divide the experts or is not a data axis, or the routing is of other tokens.

    >>> routing = fs.parallel.route(torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]), k=1)
    >>> sent = fs.parallel.dispatch(torch.tensor([[1.0], [2.0], [3.0]]), routing, axis=None)
    >>> sent.counts, sent.rows.flatten()
    ((2, 1), tensor([1., 3., 2.]))
    """
    expect("dispatch(x, routing)", [("x", x, Tensor, "a tensor"), ("routing", routing, Routing, _ROUTING)])
    if x.dim() not in (2, 3) or routing.chosen.shape[:-1] != x.shape[:-1]:
        raise PlanError(
            f"dispatch: x {list(x.shape)} must be (groups, tokens, width) or (tokens, width), and the routing of as "
            f"many tokens; it has choices {list(routing.chosen.shape)}"
        )
    if axis is not None:
        check_data_axis(axis, "dispatch", mesh)
        divided(routing.experts, axis, "experts", mesh)
    if capacity is None:
        rows, counts, way = dispatch_ragged(x, routing, axis, mesh)
        return Dispatched(rows, counts, way)
    if not capacity > 0:
        raise PlanError(f"dispatch: capacity={capacity} must be positive, such as 1.25; or None, which drops nothing")
    packed, even, slotted = dispatch_slots(x, routing, axis, capacity, mesh)
    return Dispatched(packed, even, slotted)


def combine(rows: Tensor, dispatched: Dispatched) -> Tensor:
    """Send the results of experts back to their tokens, and sum them by the routing's weights.

    Args:
        rows: (n, any width), the results for ``dispatched.rows``.
        dispatched: what ``dispatch`` returned.

    Returns:
        (groups, tokens, width), or (tokens, width), as the tokens were.

    >>> routing = fs.parallel.route(torch.tensor([[9.0, 0.0], [0.0, 9.0], [9.0, 0.0]]), k=1)
    >>> sent = fs.parallel.dispatch(torch.tensor([[1.0], [2.0], [3.0]]), routing, axis=None)
    >>> fs.parallel.combine(10 * sent.rows, sent).flatten()
    tensor([10., 20., 30.])
    """
    expect("combine(rows, dispatched)", [("dispatched", dispatched, Dispatched, "what dispatch returned")])
    return dispatched.way.back(rows)


def moe(
    x: Tensor,
    routing: Routing,
    experts: Callable[[Tensor, tuple[int, ...]], Tensor],
    *,
    axis: str | None = "ep",
    capacity: float | None = None,
    mesh: Mesh | None = None,
) -> Tensor:
    """A mixture of experts: dispatch, compute, combine.

    Args:
        x: (groups, tokens, width) or (tokens, width): this rank's tokens.
        routing: of these tokens.
        experts: ``experts(rows, counts)``: the results of this rank's experts for rows (n, width), of which the first
            ``counts[0]`` are for its first expert. See ``grouped_linear``.
        axis: the expert-parallel axis, which must be a data axis; None if every rank has all experts.
        capacity: the choices of a group that an expert takes, as a multiple of its even share; None drops nothing.
        mesh: where to look the axis up, if not on the mesh in scope.

    Raises:
        PlanError: the axis does not divide the experts or is not a data axis, or the routing is of other tokens.

    >>> x, router, weight = torch.randn(5, 4), torch.randn(3, 4), torch.randn(3, 4, 4)
    >>> expert = lambda rows, counts: fs.parallel.grouped_linear(rows, weight, counts)
    >>> y = fs.parallel.moe(x, fs.parallel.route(x @ router.T), expert, axis=None)
    >>> y.shape
    torch.Size([5, 4])
    """
    expect("moe(x, routing, experts)", [("experts", experts, Callable, "a function (rows, counts)")])
    sent = dispatch(x, routing, axis=axis, capacity=capacity, mesh=mesh)
    return combine(experts(sent.rows, sent.counts), sent)


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int], *, axis: str | None = "ep") -> Tensor:
    """A linear layer for each expert.

    Args:
        rows: (n, in), expert by expert.
        weight: (this rank's experts, out, in): a leaf under ``expert_rule``.
        counts: the rows of each expert.
        axis: the expert-parallel axis, to check the plan.

    Returns:
        (n, out).

    Raises:
        PlanError: the weight has another number of experts.

    >>> weight = torch.stack((torch.eye(2), 5 * torch.eye(2)))
    >>> fs.parallel.grouped_linear(torch.ones(3, 2), weight, (2, 1), axis=None)[:, 0]
    tensor([1., 1., 5.])
    """
    if axis is not None:
        check_cut(weight, axis, 0, EXPERTS, "fs.parallel.expert_rule")
    if weight.dim() != 3 or weight.shape[0] != len(counts):
        raise PlanError(
            f"grouped_linear: weight {path_of(weight)} {list(weight.shape)} must be (experts, out, in) with "
            f"this rank's {len(counts)} experts: give it fs.parallel.expert_rule, which cuts it along dim 0"
        )
    if len(set(counts)) == 1:
        return torch.bmm(rows.view(len(counts), counts[0], rows.shape[-1]), weight.mT).flatten(0, 1)
    parts = torch.split(rows, list(counts))
    return torch.cat([part @ one.mT for part, one in zip(parts, weight.unbind(0), strict=True)])
