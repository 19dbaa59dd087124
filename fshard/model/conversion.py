"""Code of a module that converts modules while it runs: ``self.head = self.head.to(x.dtype)``.

``nn.Module._apply``, which ``to``, ``half`` and their like call, writes into parameters, or swaps them. Neither is
possible on tensors that the module does not own. Most such code converts to what is there, and nothing is written.
"""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fshard.errors import UnitError


def convert_at(
    module: "weakref.ref[nn.Module]", fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module | None:
    """``convert`` for a module that is not kept alive by this, nor by its own dict."""
    found = module()
    return None if found is None else convert(found, fn, recurse)


def convert(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Stand in for ``nn.Module._apply`` in an instance: buffers are converted; parameters must be as asked already.

    Args:
        module: a module of the instance.
        fn: makes the converted tensor, or returns the tensor that it is given.
        recurse: whether the children are converted too.

    Raises:
        UnitError: a parameter would change.
    """
    for child in module.children() if recurse else ():
        convert(child, fn)
    for name, leaf in module._parameters.items():
        if leaf is not None and (new := fn(leaf)) is not leaf:
            raise UnitError(
                f"the call converts the parameter {name} of a {_kind(module)} from {_form(leaf)} to {_form(new)}, as "
                "module.to(...) does, and a pure function must not change its parameters: convert the module before "
                "fs.split, or convert the tensors where they are read (self.weight.to(...))"
            )
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fn(buffer)
    return module


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _form(leaf: Any) -> str:
    return f"{leaf.dtype} on {leaf.device}"
