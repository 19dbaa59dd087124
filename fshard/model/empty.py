"""Modules whose parameters take no memory, while their buffers are what they should be."""

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextlib.contextmanager
def empty_weights() -> Iterator[None]:
    """Inside of it, parameters of modules are on the meta device: they have shapes and dtypes, and no memory.

    Under ``torch.device("meta")`` buffers lose their values, too: tables of angles, masks, running statistics. Most of
    them are computed when a module is made, and no checkpoint holds them. Here they keep them. A parameter exists for
    the moment between its creation and its registration, so that no more than one at a time takes memory. (accelerate
    has ``init_empty_weights(include_buffers=False)`` for the same.)

    It holds for modules that this thread makes. Initialization of such a parameter does nothing; ``fs.init_state``
    makes values, shard by shard.

    >>> with empty_weights():
    ...     norm = nn.BatchNorm1d(4)
    >>> norm.weight.device.type, norm.running_var.tolist()
    ('meta', [1.0, 1.0, 1.0, 1.0])
    """
    thread = threading.get_ident()

    def emptied(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        here = threading.get_ident() == thread
        if not here or parameter is None or parameter.device.type == "meta" or nn.parameter.is_lazy(parameter):
            return None  # it stays; a tied one keeps its identity
        made = torch.empty_like(parameter.detach(), device="meta")
        same = type(parameter)(made, requires_grad=parameter.requires_grad)
        vars(same).update(vars(parameter))
        return same

    handle = register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
