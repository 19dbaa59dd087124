"""Code around a module of stacked experts, ``(hidden, chosen, weights) -> hidden``, whose experts lie on several ranks.

The module computes with this rank's experts, by its own forward. It is called with numbers of local experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fshard import collectives
from fshard.errors import PlanError
from fshard.model.around_calls import plain, variant
from fshard.parallel.experts import combine, dispatch
from fshard.parallel.layer_styles import Args, Kwargs, Style
from fshard.parallel.plan_checks import EXPERTS, check_cut, check_data_axis
from fshard.parallel.routing import Routing


@dataclass(frozen=True)
class ExpertsStyle(Style):
    """Experts over an axis whose ranks have the same tokens: each rank computes what its experts do, and ranks add.

    ``experts``: the number of all of them. ``skips``: whether the module's forward takes the number after its last
    expert for "none", as those of ``transformers`` do that compute experts in groups.
    """

    experts: int = 0
    skips: bool = False

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The sum over experts, equal on all ranks."""
        hidden, chosen, weights = _routed(module, args, kwargs)
        hidden, weights = collectives.pvary((hidden, weights), self.axis)
        count = self.experts // collectives.axis_size(self.axis)
        local = chosen - count * collectives.axis_index(self.axis)
        here = (local >= 0) & (local < count)
        mine = variant(module, {}, num_experts=count, _is_expert_parallel=True)
        if self.skips:
            out = plain(mine, (hidden, torch.where(here, local, count), weights * here), {})
        else:
            token, choice = here.nonzero(as_tuple=True)
            rows = _unweighted(mine, hidden[token], local[token, choice]) * weights[token, choice, None]
            out = torch.zeros_like(hidden).index_add(0, token, rows.to(hidden.dtype))
        return collectives.psum(out, self.axis)


@dataclass(frozen=True)
class DispatchStyle(Style):
    """Experts over a data axis: tokens go to the ranks of their experts and back. ``experts`` as above."""

    experts: int = 0

    local = True

    def inside(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The output for this rank's tokens."""
        check_data_axis(self.axis, type(module).__name__)
        hidden, chosen, weights = _routed(module, args, kwargs)
        routing = Routing(weights, chosen, weights.new_empty(0, self.experts))
        sent = dispatch(hidden, routing, axis=self.axis)
        counts = torch.tensor(sent.counts, device=hidden.device)
        numbers = torch.arange(len(counts), device=hidden.device).repeat_interleave(counts, output_size=len(sent.rows))
        mine = variant(module, {}, num_experts=len(counts), _is_expert_parallel=True)
        return combine(_unweighted(mine, sent.rows, numbers), sent).to(hidden.dtype)

    def _check(self, leaf: Tensor | None, dim: int) -> None:
        check_cut(leaf, self.axis, dim, EXPERTS, "the rules of fs.suggest_rules(model, mesh)")


def _routed(module: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Tensor, Tensor, Tensor]:
    """The three arguments of a module of experts."""
    given = (*args, *kwargs.values())
    if len(given) != 3 or not all(isinstance(x, Tensor) for x in given) or given[1].is_floating_point():
        raise PlanError(
            f"{type(module).__name__} was called with {len(given)} arguments, not as experts of transformers are, with "
            f"hidden states, the numbers of chosen experts, and their weights: leave it out of the model's plan"
        )
    hidden, chosen, weights = given
    return hidden, chosen, weights


def _unweighted(module: nn.Module, rows: Tensor, numbers: Tensor) -> Tensor:
    """The experts' results for rows, each of which has one expert. Experts' functions want at least one row."""
    if not len(rows):
        some = rows.sum(0, keepdim=True)
        return plain(module, (some, numbers.new_zeros(1, 1), rows.new_ones(1, 1)), {})[:0]  # type: ignore[no-any-return]
    return plain(module, (rows, numbers.unsqueeze(-1), rows.new_ones(len(rows), 1)), {})  # type: ignore[no-any-return]
