"""Finding a program, the loop over a schedule's ops, and what each op does."""

from fshard.runtime.execution.pending_update import PendingUpdate, Several, Update, partly_updated, parts_of
from fshard.runtime.execution.rounding import Rounding, rounded_groups
from fshard.runtime.execution.shards import Gradients, Shard, Shards, gradients_of, start_shard
from fshard.runtime.execution.signals import HELD_LOCALLY, Shield, held_back
from fshard.runtime.execution.trace_program import ProgramTrace

__all__ = [
    "HELD_LOCALLY",
    "ProgramTrace",
    "Gradients",
    "PendingUpdate",
    "Rounding",
    "Several",
    "Shard",
    "Shards",
    "Shield",
    "Update",
    "gradients_of",
    "held_back",
    "partly_updated",
    "parts_of",
    "rounded_groups",
    "start_shard",
]
