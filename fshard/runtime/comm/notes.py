"""Notes in the store of the job: why a rank left. gloo shows its peers a closed connection and no more."""

from contextlib import suppress
from typing import Any

import torch.distributed as dist


def leave(key: str, reason: str) -> None:
    """Leave a note before the connections close. Where the store is gone, there is nobody to read it."""
    with suppress(Exception):
        _store().set(f"fshard/left/{key}", reason)


def reason_of(key: str) -> str:
    """The note that was left; empty if there is none."""
    with suppress(Exception):
        store = _store()
        if store.check([f"fshard/left/{key}"]):
            return str(store.get(f"fshard/left/{key}").decode(errors="replace"))
    return ""


def _store() -> Any:
    c10d: Any = dist  # whose default store is not among the names that it exports
    return c10d.distributed_c10d._get_default_store()
