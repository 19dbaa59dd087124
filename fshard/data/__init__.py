"""Data: the order of samples, a loader whose position resumes on any number of ranks, packed sequences."""

from fshard.data.loader import Loader
from fshard.data.order import Order
from fshard.data.packed_rows import Packed, document_mask

__all__ = ["Loader", "Order", "Packed", "document_mask"]


def __dir__() -> list[str]:
    return sorted(__all__)
