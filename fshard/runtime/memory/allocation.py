"""Buffers whose memory comes and goes, while they and the views of them stay.

Gradients are there in the backward alone, when activations go. On a device, a buffer goes back to the caching allocator
after the compute stream has waited for whatever used it, so the allocator's own order by stream is enough.
"""

from torch import Tensor


def allocate(buffer: Tensor) -> None:
    """Give a buffer memory, if it has none now. Views of it can be used from here on; what it holds is undefined."""
    storage = buffer.untyped_storage()
    if storage.nbytes() < buffer.nbytes:
        storage.resize_(buffer.nbytes)


def deallocate(buffer: Tensor) -> None:
    """Take a buffer's memory away. Neither it nor a view of it may be used until it is allocated again."""
    buffer.untyped_storage().resize_(0)
