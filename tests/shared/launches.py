"""Counts of the kernels that a device would launch: operators that are no views and make no memory alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOM = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_local_scalar_dense", "aten::is_pinned")
"""How the names of operators begin that launch nothing."""


class Launches(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        names: the operators that launch something, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.paused = False

    def of(self, call: Callable[[], object]) -> int:
        """The launches of a call."""
        self.names.clear()
        with self:
            call()
        return len(self.names)

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """What happens inside is one kernel."""
        self.names.append("a kernel")
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        view = not func._schema.is_mutable and all(x.untyped_storage()._cdata in given for x in made)
        name = func._schema.name
        if not self.paused and not view and not name.startswith(ROOM):
            self.names.append(name)
        return out
