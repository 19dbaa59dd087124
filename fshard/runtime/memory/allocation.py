"""Allocating and freeing the memory of buffers, while the buffers and their views stay.

Gradients have memory only in the backward, which frees activations. On a device, a buffer is returned to the caching
allocator after the compute stream has waited for the last use, so the allocator's order by stream is sufficient.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor


def allocate(buffer: Tensor) -> None:
    """Give a buffer memory, if it has none. It and its views can then be used; their values are undefined."""
    storage = buffer.untyped_storage()
    if storage.nbytes() < buffer.nbytes:
        storage.resize_(buffer.nbytes)


@contextmanager
def with_memory(buffer: Tensor) -> Iterator[None]:
    """Memory for the time of a block, if there is none: a view can only be made of a buffer that has some."""
    bare = not buffer.untyped_storage().nbytes()
    allocate(buffer)
    try:
        yield
    finally:
        if bare:
            deallocate(buffer)


def deallocate(buffer: Tensor) -> None:
    """Free a buffer's memory. It and its views may not be used until it is allocated again."""
    buffer.untyped_storage().resize_(0)
