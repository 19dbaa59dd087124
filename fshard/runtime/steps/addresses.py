"""Where gradients are not finite: the leaves, their units, and the ranks that hold them."""

from collections.abc import Mapping

from torch import Tensor

from fshard.runtime.comm import Communicator, exchange_text
from fshard.sharding.plan import Plan

SHOWN = 4
"""Leaves of a rank that are named."""


def where(plan: Plan, shards: Mapping[int, Tensor], comm: Communicator) -> list[str]:
    """The leaves whose gradient is not finite, after it was summed over ranks, a line each. Collective.

    Args:
        plan: the plan.
        shards: this rank's part of the gradients, by group id.
        comm: the control communicator over the whole mesh.
    """
    found = []
    for number, shard in shards.items():
        group = plan.groups[number].owned
        part = plan.mesh.index(group.gather_axes)
        for leaf, one in enumerate(group.leaves):
            begin, end = group.shard_range(leaf, part)
            held = shard[begin:end] if shard.numel() >= end else shard[:0]
            bad = int((~held.isfinite()).sum()) if held.numel() else 0
            if bad:
                found.append(f"{bad} of {held.numel():,} elements of {one.path}, of unit {group.unit}")
    if len(found) > SHOWN:
        found[SHOWN:] = [f"{len(found) - SHOWN} more leaves"]
    said = "; ".join(found)
    texts = exchange_text(comm, said) if comm.size > 1 else [said]
    return [f"rank {rank} holds gradients that are not finite: {text}" for rank, text in enumerate(texts) if text]
