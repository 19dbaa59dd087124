"""Addresses of gradients that are not finite: the leaves, their units, and the ranks that hold them."""

import math
from collections.abc import Mapping

from torch import Tensor

from fshard.runtime.comm import Communicator, exchange_text
from fshard.sharding.plan import Plan

SHOWN = 4
"""Leaves of a rank that are named."""


def where(
    plan: Plan, shards: Mapping[int, Tensor], comm: Communicator, loss: float = 0.0, origin: str = ""
) -> list[str]:
    """Lines that say what is not finite, by rank: losses, and leaves of gradients summed over ranks. Collective.

    Args:
        shards: this rank's part of the gradients, by group id.
        comm: the control communicator over the whole mesh.
        loss: this rank's own.
        origin: what this rank knows of where they come from.
    """
    said = here(plan, shards, loss)
    if origin:
        said = f"{said}; {origin}" if said else f"rank {plan.mesh.rank}: {origin}"
    texts = exchange_text(comm, said) if comm.size > 1 else [said]
    return [*filter(None, texts)]


def here(plan: Plan, shards: Mapping[int, Tensor], loss: float = 0.0) -> str:
    """A line that says what is not finite on this rank; see ``where``."""
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
    told = [] if math.isfinite(loss) else [f"has the loss {loss}"]
    told += [f"holds gradients that are not finite: {'; '.join(found)}"] if found else []
    return f"rank {plan.mesh.rank} {', and '.join(told)}" if told else ""
