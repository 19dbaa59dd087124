"""Memory of a step: the arena and its slots, gradients, host memory, and the layout of optimizer state."""

from fshard.runtime.memory.memory_spaces import keep, memory_space, packed_parts, same_memory, values_of
from fshard.runtime.memory.optimizer_layout import BufferLayout
from fshard.runtime.memory.slots import Slots

__all__ = [
    "BufferLayout",
    "Slots",
    "keep",
    "memory_space",
    "packed_parts",
    "same_memory",
    "values_of",
]
