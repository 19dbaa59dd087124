"""Memory of a step: the arena and its slots, gradients, host memory, and the layout of optimizer state."""

from fshard.runtime.memory.gradients import FlatGradients, GradientBuffers
from fshard.runtime.memory.kept import keep, packed_parts, values_of
from fshard.runtime.memory.memory_spaces import allocate, deallocate, memory_space, same_memory
from fshard.runtime.memory.offload import Offload
from fshard.runtime.memory.optimizer_layout import BufferLayout, UpdateSlice
from fshard.runtime.memory.slots import Slots

__all__ = [
    "BufferLayout",
    "FlatGradients",
    "GradientBuffers",
    "Offload",
    "Slots",
    "UpdateSlice",
    "allocate",
    "deallocate",
    "keep",
    "memory_space",
    "packed_parts",
    "same_memory",
    "values_of",
]
