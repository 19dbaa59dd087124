"""Hooks of a program on the tensors that autograd saves, such as those that move activations to the host.

Parameters are views of the arena, whose memory soon holds other groups. A hook that keeps one, or copies it on a stream
of its own, would find those there. So hooks see what units compute, and never the parameters.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.runtime.memory import Slots
from fshard.runtime.memory.slots import storage_of
from fshard.torch_internals import saved_tensors_hooks


class SavedParameter(NamedTuple):
    """A parameter that autograd saves as it is: before the backward its group is gathered to the same place."""

    view: Tensor


class ActivationHook:
    """A hook that packs what is saved, for all tensors but parameters."""

    def __init__(self, pack: Callable[[Tensor], Any], slots: Slots) -> None:
        self.pack, self.slots = pack, slots

    def __call__(self, x: Tensor) -> Any:
        """Return what autograd keeps in the place of a tensor."""
        return SavedParameter(x) if storage_of(x) in self.slots.storages else self.pack(x)


def without_parameters(slots: Slots) -> AbstractContextManager[object]:
    """Inside, the hooks that are set now get no parameters. Activation checkpointing has hooks that keep nothing."""
    hooks = saved_tensors_hooks(False)
    if hooks is None:
        return nullcontext()
    pack, unpack = hooks
    if isinstance(pack, ActivationHook) or getattr(pack, "__module__", "") == "torch.utils.checkpoint":
        return nullcontext()

    def unpack_others(kept: Any) -> Tensor:
        return kept.view if isinstance(kept, SavedParameter) else unpack(kept)

    return torch.autograd.graph.saved_tensors_hooks(ActivationHook(pack, slots), unpack_others)
