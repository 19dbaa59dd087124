"""The parameter tree that a loss function is given."""

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fshard.errors import written_outside
from fshard.model.leaves import LeafOrder
from fshard.model.unit import Slot, slot_of
from fshard.runtime.engine.proxies import Proxy, make_proxy
from fshard.runtime.memory import Slots
from fshard.sharding.plan import Plan


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
