"""Whole tensors of all stages of a pipeline, on every rank."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import StageTable


def of_all_stages(own: Mapping[str, Tensor], plan: Plan, stages: StageTable) -> dict[str, Tensor]:
    """The whole tensors of all stages, given those of this rank's. Collective along the axis of stages."""
    out: dict[str, Tensor] = {}
    ranks, frozen = Ranks(plan.mesh, (stages.axis,)), {path for path, leaf in plan.leaves.items() if not leaf.trainable}
    # A tree of optimizer state has no frozen leaves, which ranks without any cannot see.
    given = torch.tensor([not frozen.isdisjoint(own)], device=plan.mesh.device)
    all_leaves = not frozen or bool(apply(given, Collect(ranks, -1)).any())
    for path, leaf in plan.leaves.items():
        if not all_leaves and path in frozen:
            continue
        mine = own.get(path)
        row = torch.zeros(leaf.shape, dtype=leaf.dtype, device=plan.mesh.device) if mine is None else mine
        rows = apply(row.reshape(-1), Collect(ranks, -1))
        out[path] = rows.view(-1, row.numel())[stages.positions(path)[0]].view(leaf.shape).clone()
    return out
