"""Activations that wait on the host for their backward.

While a hosted call runs, each tensor that autograd saves is noted by its storage, once: views of one storage, and
calls that save the same, share it. After the call the schedule has what it keeps copied to the host
(``activation_offload``), lets go of the source once that is over, and has it copied back ahead of the backward
(``activation_fetch``). From then on autograd alone holds it, so it goes as soon as it would have gone without.

Some stay where they are: parameters, which are views of the arena or of shards; the batch, which its owner holds
anyway; and what is no plain memory of the device.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.comm import Handle
from fshard.runtime.memory import Slots
from fshard.runtime.memory.activation_copies import Copies
from fshard.runtime.memory.slots import storage_of
from fshard.torch_internals import FakeTensor, saved_tensors_hooks

HostedKey = tuple[str, int]
"""A unit and its call."""

PLAIN = (Tensor, FakeTensor)
"""The classes of tensors that leave. Others may hold more than one storage."""


class SavedStorage:
    """A storage that autograd has saved something of.

    Attributes:
        source: its bytes where the forward has left them, until they are on the host.
        version: of the source when it was saved.
        kept: the same on the host, until they are back.
        back: the same on the device again.
        changed: whether the source was written to after it was saved.
    """

    __slots__ = ("__weakref__", "back", "changed", "kept", "source", "version")

    def __init__(self, source: Tensor) -> None:
        self.source: Tensor | None = source
        self.version = source._version
        self.kept: Tensor | None = None
        self.back: Tensor | None = None
        self.changed = False

    def leaves(self) -> bool:
        """Tell whether it is to be copied to the host."""
        if self.source is not None and self.source._version != self.version:
            self.changed, self.source = True, None
        return self.source is not None and self.kept is None

    def bytes(self) -> Tensor:
        """All of its bytes on the device.

        Raises:
            RuntimeError: it was written to after it was saved, as autograd says it.
        """
        source = self.source
        if self.back is not None:
            return self.back
        if self.changed or (source is not None and source._version != self.version):
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"result that remat='offload' was to move is not at version {self.version} any more"
            )
        assert source is not None, "a schedule brings back what a backward reads"
        return source


class SavedView(NamedTuple):
    """A tensor that autograd has saved: a view of a storage."""

    storage: SavedStorage
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor."""
        whole = self.storage.bytes()
        with torch.no_grad():
            return whole.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class HostedActivations:
    """Moves what the calls of a program keep to the host and back.

    Args:
        slots: the slots of parameters.
        calls: the calls whose activations leave.
        copies: copies them.
    """

    def __init__(self, slots: Slots, calls: Iterable[HostedKey], copies: Copies) -> None:
        self.slots, self.calls, self.copies = slots, frozenset(calls), copies
        self.device = torch.device("cpu")
        self.known: frozenset[int | None] = frozenset()
        self.seen: dict[int, tuple[Any, Any]] = {}  # weak references to a storage and what is known of it
        self.held: dict[HostedKey, list[SavedStorage]] = {}
        self.under_way: dict[tuple[bool, HostedKey], tuple[list[SavedStorage], Handle]] = {}

    def begin(self, batch: Any) -> None:
        """A run of the program on a batch begins."""
        self.stop()
        self.known = frozenset([storage_of(x) for x in tree.leaves(batch) if isinstance(x, Tensor)])
        self.device = next(iter(self.slots.by_path.values())).device

    def stop(self) -> None:
        """The run is over, or has failed: nothing is kept any more."""
        for _, handle in self.under_way.values():
            handle.wait()  # only a failure has left any: later work on the device may use its memory
        every = [*self.held.values(), *(moved for moved, _ in self.under_way.values())]
        self._drop(list({id(one): one for held in every for one in held}.values()))
        self.under_way.clear()
        self.held.clear()
        self.seen.clear()

    @contextmanager
    def saving(self, call: HostedKey) -> Iterator[None]:
        """Inside, autograd saves by storages."""
        held = self.held.setdefault(call, [])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: self.pack(x, held), self.unpack):
            yield

    def saved(self, call: HostedKey, values: Sequence[Any]) -> list[Any]:
        """Values that a graph of a call has saved, and what is kept in the place of those that leave."""
        held = self.held.setdefault(call, [])
        return [self.pack(x, held) if type(x) is Tensor else x for x in values]

    def pack(self, x: Tensor, held: list[SavedStorage]) -> Any:
        """Return what is kept in the place of a tensor."""
        storage = self._storage(x)
        if storage is None:
            return x
        if not any(storage is one for one in held):
            held.append(storage)
        return SavedView(storage, x.dtype, x.size(), x.stride(), int(x.storage_offset()))

    @staticmethod
    def unpack(kept: Any) -> Any:
        """Return the tensor again."""
        return kept.tensor() if isinstance(kept, SavedView) else kept

    def verbs(self) -> dict[str, Callable[[HostedKey], None]]:
        """Return what ops do to the calls that they name."""
        return {
            "activation_offload": self.leave,
            "wait activation_offload": self.left,
            "activation_fetch": self.come,
            "wait activation_fetch": self.came,
        }

    def leave(self, call: HostedKey) -> None:
        """Start to copy what a call keeps to the host."""
        leaving = [one for one in self.held.get(call, ()) if one.leaves()]
        kept, handle = self.copies.leave(call, [one.source for one in leaving if one.source is not None])
        for one, buffer in zip(leaving, kept, strict=True):
            one.kept = buffer
        self.under_way[True, call] = leaving, handle

    def left(self, call: HostedKey) -> None:
        """It is on the host: let go of the source."""
        leaving, handle = self.under_way.pop((True, call), ((), None))
        if handle is not None:
            handle.wait()
        for one in leaving:
            one.source = None

    def come(self, call: HostedKey) -> None:
        """Start to copy it back. What a later call has kept too is back already."""
        held = self.held.pop(call, [])
        coming = [one for one in held if one.kept is not None and one.back is None]
        held.clear()  # autograd's hooks refer to the list
        back, handle = self.copies.come(call, [one.kept for one in coming if one.kept is not None])
        for one, target in zip(coming, back, strict=True):
            one.back = target
        self.under_way[False, call] = coming, handle

    def came(self, call: HostedKey) -> None:
        """It is there: autograd holds what it still reads."""
        coming, handle = self.under_way.pop((False, call), ((), None))
        if handle is not None:
            handle.wait()
        self._drop(coming)

    def _drop(self, storages: Sequence[SavedStorage]) -> None:
        self.copies.drop([one.kept for one in storages if one.kept is not None])
        for one in storages:
            one.kept = None

    def _storage(self, x: Tensor) -> SavedStorage | None:
        """Return the storage of a tensor, as it is known; None if it stays where it is."""
        key = storage_of(x)
        if key is None or key in self.slots.storages or key in self.known:
            return None
        if type(x) not in PLAIN or (x.is_leaf and x.requires_grad):
            return None
        storage = x.untyped_storage()
        known, saved = self.seen.get(key, (_nothing, _nothing))
        found: SavedStorage | None = saved() if known() is storage else None
        if found is not None and found.version == x._version:
            return found
        whole = self._bytes(x)
        if whole is None:
            return None
        found = SavedStorage(whole)
        self.seen[key] = weakref.ref(storage), weakref.ref(found)
        return found

    def _bytes(self, x: Tensor) -> Tensor | None:
        """All bytes of the storage of a tensor; None where that is not plain memory of the device."""
        count, rest = divmod(x.untyped_storage().nbytes(), x.element_size())
        odd = x.is_conj() or x.is_neg() or x.is_quantized or x.device != self.device
        if rest or not count or odd:
            return None
        with torch.no_grad():
            return x.detach().as_strided((count,), (1,), 0).view(torch.uint8)


def hosting(activations: HostedActivations | None, call: HostedKey) -> AbstractContextManager[None] | None:
    """The context of a call whose activations leave; None for others, and where the program checkpoints the call."""
    if activations is None or call not in activations.calls:
        return None
    hooks = saved_tensors_hooks(False)
    checkpointed = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return None if checkpointed else activations.saving(call)


def _nothing() -> None:
    """A weak reference to what is not there."""
