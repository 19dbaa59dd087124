"""Methods that the modules of instances have of their own: a forward with code around it, and ``_apply``.

Tensor parallelism is such code: it communicates before and after the forward of a layer whose weights are cut over
ranks. The module's class and attributes stay as they are.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from fshard.errors import UnitError


class CutSize(NamedTuple):
    """A parameter of a module that ranks hold parts of: its name, the dim that is cut, and that dim's whole size."""

    name: str
    dim: int
    size: int


@dataclass(frozen=True)
class AroundCall(ABC):
    """Code around the calls of a module, as ``Model.around`` has it by path. A value: equal ones do the same.

    Attributes:
        axis: the mesh axis over which ranks hold parts of the module's parameters.
        cuts: the parameters that are cut.
        local: whether the axis is a data axis, over which these parameters are never gathered.
    """

    axis: str
    cuts: tuple[CutSize, ...] = ()

    local = False

    @abstractmethod
    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module: ``plain(module, args, kwargs)``, with something before or after it."""


def plain(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a module's class."""
    return type(module).forward(module, *args, **kwargs)


def variant(module: nn.Module, leaves: Mapping[str, Tensor | None], **attributes: Any) -> nn.Module:
    """A module that shares all with another but these parameters and attributes.

    >>> layer = nn.Linear(2, 3)
    >>> other = variant(layer, {"bias": None}, in_features=7)
    >>> other.bias, other.weight is layer.weight, layer.in_features
    (None, True, 2)
    """
    made: nn.Module = object.__new__(type(module))
    table = {**vars(module), "_parameters": {**module._parameters, **leaves}, **attributes}
    object.__setattr__(made, "__dict__", table)
    return made


def surrounded(around: AroundCall, module: "weakref.ref[nn.Module]", signature: Any) -> Callable[..., Any]:
    """The forward of a module in an instance. The module's own dict holds it, so the reference is weak."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        found = module()
        assert found is not None  # its forward runs
        return around.call(found, args, kwargs)

    vars(forward)["__signature__"] = signature
    return forward


def converted(
    module: "weakref.ref[nn.Module]", fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module | None:
    """Stand in for ``nn.Module._apply``: code may call ``self.head.to(x.dtype)`` where this converts no parameter.

    torch's own writes into parameters, or swaps them, and an instance does not own its parameters. The reference is
    weak because the module's own dict holds this function.
    """
    found = module()
    if found is None:
        return None
    for child in found.children() if recurse else ():
        child._apply(fn)  # type: ignore[no-untyped-call]
    for name, leaf in found._parameters.items():
        if leaf is not None and (new := fn(leaf)) is not leaf:
            raise UnitError(
                f"the call converts the parameter {name} of a {type(found).__name__} from {leaf.dtype} on "
                f"{leaf.device} to {new.dtype} on {new.device}, as module.to(...) does, and a pure function must not "
                "change its parameters: convert the module before fs.split, or convert the tensors where they are "
                "read (self.weight.to(...))"
            )
    for name, buffer in found._buffers.items():
        found._buffers[name] = None if buffer is None else fn(buffer)
    return found
