"""Stochastic rounding of parameters that are kept in bfloat16.

An update is often smaller than half of the last bit of a bfloat16 parameter; rounded to nearest, it is lost, and
training stalls. Rounded up with the probability of what is cut off, it counts on average (Gupta et al., "Deep Learning
with Limited Numerical Precision", 2015; Zamirai et al., "Revisiting BFloat16 Training", 2020). The random bits come
from (seed, step, path, global index), so they do not depend on the mesh.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.model.philox import fold, integers, runs
from fshard.runtime.memory.optimizer_layout import UpdateSlice
from fshard.sharding.layout import global_runs
from fshard.sharding.plan import Plan

Slice = tuple[Tensor, dict[str, Tensor]]
"""A slice of a shard, and of the optimizer's buffers."""


def round_stochastic(x: Tensor, bits: Tensor) -> Tensor:
    """A float32 tensor in bfloat16: up or down, with the probability of what is cut off. Infinities and nan stay.

    Args:
        x: float32.
        bits: int32 of its shape, in ``[0, 2**16)``.

    >>> round_stochastic(torch.tensor([1.0, 1.00390625]), torch.tensor([65535, 40000], dtype=torch.int32)).tolist()
    [1.0, 1.0078125]
    """
    rounded = (x.view(torch.int32) + bits).bitwise_and_(-65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def rounded_groups(plan: Plan) -> frozenset[int]:
    """The groups whose updates are rounded stochastically."""
    asked = (g for g in plan.groups if g.trainable and g.leaves[0].precision.rounding == "stochastic")
    return frozenset(group.id for group in asked if group.dtype == torch.bfloat16)


@dataclass(frozen=True)
class Rounding:
    """Updates that are computed in float32 and rounded stochastically.

    Args:
        plan: the plan.
        seed: of the random bits.
        groups: the ids of the groups that it is for.
    """

    plan: Plan
    seed: int
    groups: frozenset[int]

    def update(
        self,
        group: int,
        update_slices: Sequence[UpdateSlice],
        slices: Sequence[Slice],
        grads: Sequence[Tensor],
        step: int,
        rule: Callable[[list[Tensor], list[Tensor], list[dict[str, Tensor]], UpdateSlice], None],
    ) -> None:
        """Update one group: parameters and those buffers that are bfloat16 too are widened, updated and rounded."""
        for (param, state), grad, cut in zip(slices, grads, update_slices, strict=True):
            wide = {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in state.items()}
            new = param.float()
            rule([new], [grad.float()], [wide], cut)
            param.copy_(round_stochastic(new, self._bits(group, cut, step, "", param.device)))
            for name, value in state.items():
                if wide[name] is value:
                    continue
                alike = value.shape == param.shape
                bits = self._bits(group, cut, step, name, param.device) if alike else None
                value.copy_(wide[name] if bits is None else round_stochastic(wide[name], bits))

    def _bits(self, group: int, cut: UpdateSlice, step: int, what: str, device: torch.device) -> Tensor:
        """Random bits for an update slice."""
        held, mesh = self.plan.groups[group].owned, self.plan.mesh
        part = mesh.index(held.gather_axes)
        bits = torch.zeros(cut.end - cut.begin, dtype=torch.int32, device=device)
        for number in range(cut.leaves[0], cut.leaves[1] + 1):
            at, leaf = held.shard_range(number, part)[0] - cut.begin, held.leaves[number]
            key = fold(self.seed, f"round:{what}:{step}:{leaf.path}")
            for begin, length in global_runs(leaf.shape, held.piece(number, mesh), device):
                drawn = runs(key, begin, length, lambda words: (integers(words) >> 16).to(torch.int32)).view(-1)
                bits[at : at + len(drawn)] = drawn
                at += len(drawn)
        return bits
