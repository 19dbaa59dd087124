"""Activations in memory that counts as that of a host: maps of their own, which no allocator of a heap hands out.

On a machine without a GPU the host and the device have one memory. What a step has moved to the host must not count
among what it holds on the device, so it is in maps that ``tensors.c`` does not see, for fshard and for the peer alike.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import peers
import torch
from model import Size, loss_of, make
from torch import Tensor


def mapped(size: int) -> Tensor:
    """Bytes in a map of their own, which goes with the tensor."""
    return torch.frombuffer(mmap.mmap(-1, max(size, 1)), dtype=torch.uint8)[:size]


class Maps:
    """The memory of a host."""

    @staticmethod
    def empty(size: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of bytes."""
        return mapped(size)


@contextmanager
def on_the_host() -> Iterator[None]:
    """Inside, fshard's buffers for activations are such maps."""
    with mock.patch("fshard.runtime.memory.activation_copies.memory_space", lambda kind, mesh: Maps):
        yield


def pack(x: Tensor) -> Any:
    """A copy of what autograd saves, as ``torch.autograd.graph.save_on_cpu`` makes it, on the host."""
    kept = mapped(x.nbytes)
    kept.view(x.dtype).view(x.shape).copy_(x)
    return kept, x.dtype, x.shape


def unpack(packed: Any) -> Tensor:
    """The same on the device."""
    kept, dtype, shape = packed
    return torch.empty(shape, dtype=dtype).copy_(kept.view(dtype).view(shape))


class SavedOnHost(peers.Torch):
    """FSDP2 whose forward saves on the host, weights included; each tensor comes back where its node asks for it."""

    def __init__(self, size: Size) -> None:
        super().__init__(make(size), lambda module: peers.fsdp2(module, prefetch=2))

    def step(self, rows: Tensor) -> None:
        """One step."""
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = loss_of(self.module(rows[:, :-1]), rows)
        loss.backward()
        self.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()


def others(size: Size) -> dict[str, peers.Peer]:
    """FSDP2 with all activations on the device, and with none."""
    return {"fsdp2, kept": peers.PEERS["fsdp2 prefetch 2"](make(size)), "fsdp2 save_on_cpu": SavedOnHost(size)}
