"""Whole tensors of all stages of a pipeline, on every rank."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import StageTable


def of_all_stages(own: Mapping[str, Tensor], plan: Plan, stages: StageTable) -> dict[str, Tensor]:
    """The whole tensors of all stages, given those of this rank's. Collective along their axis.

    Args:
        own: by path.
        plan: the plan of all stages.
        stages: its stages.
    """
    out: dict[str, Tensor] = {}
    idle = not any(not leaf.trainable and path in own for path, leaf in plan.own.leaves.items())
    for path, leaf in plan.leaves.items():
        if idle and not leaf.trainable:
            continue
        mine = own.get(path)
        row = torch.zeros(leaf.shape, dtype=leaf.dtype, device=plan.mesh.device) if mine is None else mine
        rows = apply(row.reshape(-1), Collect(Ranks(plan.mesh, (stages.axis,)), -1))
        out[path] = rows.view(-1, row.numel())[stages.positions(path)[0]].view(leaf.shape).clone()
    return out
