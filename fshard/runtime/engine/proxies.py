"""The parameter tree that a loss function is given, with proxies for leaves that only units may read.

A schedule gathers a group for the units that read it. Were code outside of units given the slot leaf itself, it could
read memory that holds another group, or that an update has not reached yet, and nobody would know. A proxy knows its
shape and nothing else: units get the slot leaf in its place, and any other use gives the step up and has it run again
on demand. Transforms have engines of their own, which give code outside of units the leaf.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import UnitError, written_outside
from fshard.model.leaves import LeafOrder
from fshard.model.unit import Slot, attach, slot_of
from fshard.runtime.memory import Slots
from fshard.sharding.plan import Plan
from fshard.torch_internals import DisableFuncTorch, DisableTorchFunctionSubclass, disable_current_modes


class Mispredicted(Exception):  # noqa: N818 - not an error: the step runs again
    """The program did what the schedule does not expect from here on."""


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


METADATA = frozenset(
    (
        *map(_getter, ("shape", "dtype", "ndim", "layout", "requires_grad", "is_leaf", "grad")),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.is_contiguous),
        *(Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.__hash__),
    )
)
"""Questions that a proxy answers: none depends on values."""

PLACE: dict[Any, Callable[[torch.device], Any]] = {
    _getter("device"): lambda device: device,
    _getter("is_cpu"): lambda device: device.type == "cpu",
    _getter("is_cuda"): lambda device: device.type == "cuda",
    _getter("is_meta"): lambda device: False,
    Tensor.get_device: lambda device: -1 if device.type == "cpu" else device.index,
}
"""What is answered from where the leaf lies. ``torch.utils.checkpoint`` asks for it."""


class Proxy(Tensor):
    """A leaf as code outside of units sees it: of the right shape, and without values.

    Where it is read, the engine gives the leaf, or refuses.
    """

    lies_on: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions of shape and place; for all else, replace proxies by leaves."""
        if func in PLACE:
            return PLACE[func](args[0].lies_on)
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree.mapped(opened, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        slot: Slot = self._fshard_slot  # type: ignore[attr-defined]
        return f"<parameter {slot.path}: {list(self.shape)}, gathered where its unit runs>"


def opened(value: Any) -> Any:
    """Return the leaf that a proxy stands for, as its engine has it, and any other value unchanged."""
    slot = slot_of(value) if isinstance(value, Proxy) else None
    if slot is None:
        return value
    leaf: Tensor = slot.engine.leaf(slot.path)  # type: ignore[attr-defined]
    return leaf.detach() if slot.stopped else leaf


def make_proxy(slot: Slot, like: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A proxy with this slot, and the gradient of another tensor."""
    with DisableFuncTorch(), disable_current_modes():  # a trace would make a fake tensor
        empty = torch.empty(shape, dtype=dtype, device="meta")
        proxy: Proxy = Tensor._make_subclass(Proxy, empty, like.requires_grad)
    proxy.lies_on = device
    attach(proxy, slot)
    return proxy


def foreign_params() -> UnitError:
    """A program uses parameters that belong to another step."""
    return UnitError(
        "the program reads parameters of another step: use params only inside the loss function that receives them"
    )


class Parameters:
    """Slot leaves, and proxies for the leaves that units alone may read.

    Args:
        plan: the plan.
        slots: the slots of its groups.
        root: ids of the groups that code outside of units reads; None if the program is not known, and may read all.

    Attributes:
        guarded: ids of the groups whose leaves are proxies.
    """

    def __init__(self, plan: Plan, slots: Slots, root: Sequence[int] | None = None) -> None:
        self._layout = LeafOrder("params", plan.leaves)
        known = root is not None
        self.guarded = frozenset(group.id for group in plan.groups if known and group.id not in (root or ()))
        self._slots = slots
        self._leaves: list[Tensor] = []
        self._open: dict[str, Tensor] = {}
        self._tree: dict[str, Any] = {}

    def tree(self) -> dict[str, Any]:
        """Nested dicts of the leaves. They are the same dicts each time, unless somebody has written to them."""
        if not self._leaves:
            held = self._slots.by_path | self._proxies()
            self._leaves = [held[path] for path in self._layout.paths]
            self._open = {path: leaf for path, leaf in held.items() if type(leaf) is not Proxy}
        found = self._layout.read(self._tree)  # this takes half the time of making the dicts
        if found is None or not all(map(operator.is_, found, self._leaves)):
            self._tree = self._layout.tree(self._leaves)
        return self._tree

    def versions(self) -> list[int]:
        """The version counters of the slot leaves in the tree. Proxies cannot be written."""
        return [leaf._version for leaf in self._open.values()]

    def check_unwritten(self, versions: Sequence[int]) -> None:
        """Refuse a program that wrote to leaves, whose versions were these before.

        Raises:
            UnitError: naming the leaves.
        """
        if versions != self.versions():
            now = zip(self._open.items(), versions, strict=True)
            raise written_outside([path for (path, leaf), version in now if leaf._version != version])

    def _proxies(self) -> dict[str, Tensor]:
        found = {}
        for slots in self._slots.groups:
            for leaf, tensor in zip(slots.group.leaves, slots.leaves, strict=True):
                slot = slot_of(tensor)
                if slot is not None and slots.group.id in self.guarded:
                    own = Slot(slot.engine, slot.path, slot.casting, slot.shape)
                    found[leaf.path] = make_proxy(own, tensor, leaf.compute_shape, tensor.dtype, tensor.device)
        return found
