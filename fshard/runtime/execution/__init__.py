"""Finding a program, the loop over a schedule's ops, and what each op does."""

from fshard.runtime.execution.rounding import Rounding, rounded_groups
from fshard.runtime.execution.signals import Shield
from fshard.runtime.execution.trace import Found, idle_leaves
from fshard.runtime.execution.update import (
    Gradients,
    Pending,
    Shard,
    Shards,
    Update,
    gradients_of,
    partly_updated,
    start_shard,
)

__all__ = [
    "Found",
    "Gradients",
    "Pending",
    "Rounding",
    "Shard",
    "Shards",
    "Shield",
    "Update",
    "gradients_of",
    "idle_leaves",
    "partly_updated",
    "rounded_groups",
    "start_shard",
]
