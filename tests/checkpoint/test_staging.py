"""Bytes of a device reach host memory of any size through a few page-locked chunks."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fshard.checkpoint import save
from fshard.checkpoint.save import CHUNKS, Staging
from fshard.runtime.comm.device_streams import Stream

CPU = torch.device("cpu")


class Late(Stream):
    """A stream whose copies have arrived when the host has waited for their event."""

    def __init__(self) -> None:
        self.waited, self.issued = 0, 0

    def record(self) -> Any:
        """The event of a copy."""
        self.issued += 1
        return self

    def synchronize(self) -> None:
        """The host waits for the oldest copy."""
        self.waited += 1
        assert self.issued - self.waited < CHUNKS, "a chunk is filled that has not been emptied"


@pytest.mark.parametrize("sizes", [(0,), (63,), (64,), (1000, 1, 0, 129, 64), (5,) * 300])
def test_copies_of_any_size_take_no_more_than_their_chunks(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    real: Callable[..., torch.Tensor] = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        tensor = real(*args, **options)
        made.append(weakref.ref(tensor))
        return tensor

    late = Late()
    monkeypatch.setattr(save, "CHUNK", 64)
    monkeypatch.setattr(save, "copy_stream", lambda device, name: late)
    given = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
    rows = [torch.zeros_like(data) for data in given]
    with monkeypatch.context() as change:
        change.setattr(torch, "empty", empty)
        staging = Staging(CPU)
        for _ in range(2):  # the next save takes the same chunks
            staging.copy(list(zip(rows, given, strict=True)), ())
    assert all(torch.equal(row, data) for row, data in zip(rows, given, strict=True))
    assert [len(tensor) for one in made if (tensor := one()) is not None] == [64] * CHUNKS == [64] * len(made)
    assert late.issued == late.waited


def test_chunks_for_a_gpu_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []

    def empty(*args: Any, pin_memory: bool, **options: Any) -> None:
        pinned.append(pin_memory)

    monkeypatch.setattr(save, "copy_stream", lambda device, name: Late())
    monkeypatch.setattr(torch, "empty", empty)
    for device in (CPU, torch.device("cuda", 0)):
        Staging(device)
    assert pinned == [False] * CHUNKS + [True] * CHUNKS
