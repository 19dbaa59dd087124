"""Parameters into which no gradient flows, and which stay sharded all the same."""

from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.model.unit import Slot, attach, slot_of
from fshard.torch_internals import DisableTorchFunctionSubclass, FakeTensor, disable_current_modes

_STOPPED = "stopped"


def stop_gradient(values: Any) -> Any:
    """The same values, into which no gradient flows (``jax.lax.stop_gradient``).

    For parts of a loss function's parameters: units that get such a subtree are gathered where they run, as ever, and
    other calls of the same units keep their gradients. A detached leaf would have to be gathered for the whole step.

    Args:
        values: any pytree, such as a subtree of ``params``. Leaves that are no tensors stay as they are.

    >>> w = torch.ones(2, requires_grad=True)
    >>> fs.stop_gradient({"w": w})["w"].requires_grad
    False
    """
    return tree.mapped(_stopped, values)


def _stopped(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    slot = slot_of(leaf)
    if slot is None or slot.stopped:
        return leaf.detach() if slot is None else leaf
    own = slot.instances.get(_STOPPED)
    if own is None:
        own = slot.instances[_STOPPED] = Slot(slot.engine, slot.path, slot.casting, slot.shape, True)
    if isinstance(leaf, FakeTensor) or type(leaf) in (Tensor, torch.nn.Parameter):
        with disable_current_modes():  # a trace would take it for a read of the leaf
            made = leaf.detach()
    else:  # it stands for a leaf that is not there yet
        with DisableTorchFunctionSubclass():
            made = Tensor._make_subclass(type(leaf), leaf.detach(), False)
        vars(made).update(vars(leaf))
    attach(made, own)
    return made
