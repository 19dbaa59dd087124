"""The arena and its static slots.

Every gathered group has one offset in the arena for all its lifetimes, and its leaves are created once, as views of
``arena.data[...]``. When a group is gathered again, the saved tensors, closures and views that alias its leaves are
valid again, so saved-tensor hooks, resized storages and recomputation are not needed. ``.data`` gives the leaves their
own version counters, so a gather, which writes to the arena, does not change them.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fshard.model.float8 import FLOAT8, attach_rows
from fshard.model.precision import Casting
from fshard.model.unit import Slot, attach, slot_of
from fshard.runtime.memory.memory_spaces import allocate, deallocate, with_memory
from fshard.sharding.layout import Group
from fshard.sharding.leaf import casting_of
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan


class GroupSlots:
    """The memory of one group while a step runs.

    Attributes:
        leaves: the tensors that units read, with ``_fshard_slot`` attached.
        full: the gathered buffer, None if the group is resident.
        stage: the buffer for rank-major data of a ``dim`` group, before they are unpacked.
        grad: the full flat gradient; None if frozen. It has memory only while it is in use.
        reduce_stage: the staging of its reduction, likewise.
        reduced: whether the gradient has a reduction.
        grads: a view of it for each leaf.
        gaps: views of its elements that no leaf covers.
        numbers: of all leaves, in order.
        storages: the identities of the storages that the leaves are views of.
        binds: how often the leaves were bound.
    """

    def __init__(self, group: Group, mesh: Mesh, engine: Any, casting: Casting | None = None) -> None:
        self.group = group
        self.full: Tensor | None = None
        self.stage: Tensor | None = None
        self.grad: Tensor | None = None
        self.reduce_stage: Tensor | None = None
        self.reduced = False
        self.grads: list[Tensor] = []
        self.gaps: list[Tensor] = []
        self.bound: Tensor | None = None
        self.binds = 0
        self.leaves: list[Tensor] = []
        self.numbers = list(range(len(group.leaves)))
        self.storages: set[int] = set()
        for leaf in group.leaves:
            tensor = torch.empty(0, dtype=group.compute_dtype, device=mesh.device).requires_grad_(leaf.trainable)
            attach(tensor, Slot(engine, leaf.path, casting, leaf.shape))
            self.leaves.append(tensor)

    def bind(self, buffer: Tensor) -> None:
        """Make the leaves views of a full buffer. They stay the same objects."""
        self.storages = {buffer.untyped_storage()._cdata}
        self.binds += 1
        if self.group.row:
            self.storages |= bind_rows(self.group, buffer.data, self.leaves)
            return
        for view, leaf in zip(leaf_views(self.group, buffer.data), self.leaves, strict=True):
            leaf.data = view

    def bind_resident(self, buffer: Tensor) -> None:
        """Make the leaves of a group that is not gathered views of its shard, or of its cast."""
        if self.bound is not buffer:
            self.bind(buffer)
            self.bound = buffer

    def bind_grad(self, buffer: Tensor) -> None:
        """Make the gradients views of a full flat buffer."""
        self.grad = buffer
        with with_memory(buffer):
            self.grads = leaf_views(self.group, buffer)
            self.gaps = [buffer[a:b] for a, b in self.group.gaps]

    def claim_grad(self) -> Tensor:
        """The flat gradient, with memory."""
        assert self.grad is not None, self.group.name
        allocate(self.grad)
        return self.grad

    def drop_grad(self) -> None:
        """Free the flat gradient, after its reduction."""
        assert self.grad is not None, self.group.name
        deallocate(self.grad)

    def drop_stage(self) -> None:
        """Free the staging of the reduction."""
        assert self.reduce_stage is not None, self.group.name
        deallocate(self.reduce_stage)


class Slots:
    """The slots of all groups of a plan over one arena.

    Attributes:
        groups: the slots of each group.
        by_path: every leaf, by its path.
        trained: the leaves that may get gradients.
        storages: the identities of all storages that a leaf may alias.
        epoch: changes whenever leaves have been bound to other memory.
    """

    def __init__(self, plan: Plan, engine: Any) -> None:
        casting = casting_of(plan.precision, (plan.whole or plan).leaves)
        self.groups = [GroupSlots(group, plan.mesh, engine, casting) for group in plan.groups]
        self.by_path = {
            leaf.path: tensor
            for slots in self.groups
            for leaf, tensor in zip(slots.group.leaves, slots.leaves, strict=True)
        }
        self.arena: Tensor | None = None
        self.trained: list[Tensor] = []
        self.storages: set[int] = set()
        self.epoch = -1

    def refresh(self) -> None:
        """Record where the leaves are, after they were bound."""
        epoch = sum([slots.binds for slots in self.groups])
        if epoch != self.epoch:
            self.epoch = epoch
            self.storages = set().union(*[slots.storages for slots in self.groups])
            trained = [leaf for slots in self.groups if slots.group.trainable for leaf in slots.leaves]
            self.trained = [leaf for leaf in trained if leaf.requires_grad]

    def place(self, arena: Tensor, offsets: Mapping[str, int], stage_numel: Mapping[int, int]) -> None:
        """Make views of the arena: ``param:`` items at their offsets in bytes.

        Args:
            offsets: by item.
            stage_numel: the elements of the staging of each reduction, by group id. Gradients and staging are outside
                of the arena, and get memory when they are used.
        """
        self.arena = arena
        for slots in self.groups:
            group = slots.group
            at = offsets.get(f"param:{group.name}")
            if at is not None:
                rows = group.wires["all_gather"].nbytes(group.numel) if group.row else 0
                slots.full = cut(arena, at, rows or group.numel, torch.uint8 if rows else group.compute_dtype)
                slots.bind(slots.full)
                if group.staged:
                    slots.stage = cut(arena, at + slots.full.nbytes, group.numel, group.compute_dtype)
            if group.id in stage_numel:
                slots.bind_grad(torch.empty(group.numel, dtype=group.reduce_dtype, device=arena.device))
                slots.reduce_stage = torch.empty(stage_numel[group.id], dtype=group.reduce_dtype, device=arena.device)
                slots.reduced = True
                slots.drop_grad()
                slots.drop_stage()

    def replace(self, slots: GroupSlots, number: int, leaf: Tensor) -> None:
        """Replace a leaf by another tensor, such as a fake one."""
        slot = slot_of(slots.leaves[number])
        assert slot is not None
        attach(leaf, slot)
        slots.leaves[number] = self.by_path[slot.path] = leaf
        slots.storages.add(leaf.untyped_storage()._cdata)

    def path_of(self, x: Tensor) -> str:
        """The path of the leaf whose memory a tensor begins in."""
        at = x.data_ptr() if self.arena is not None else None
        for path, leaf in self.by_path.items():
            if storage_of(leaf) == storage_of(x) and (
                at is None or leaf.data_ptr() <= at < leaf.data_ptr() + leaf.nbytes
            ):
                return path
        return "a parameter"

    def moved(self) -> list[str]:
        """The paths of leaves that somebody else has bound to other memory (``leaf.data = ...``)."""
        pairs = [
            (leaf.path, slots, x)
            for slots in self.groups
            for leaf, x in zip(slots.group.leaves, slots.leaves, strict=True)
        ]
        return [path for path, slots, x in pairs if slots.storages and storage_of(x) not in slots.storages]

    def stopped(self) -> list[str]:
        """The paths of trainable leaves on which somebody has called ``requires_grad_(False)``, which is undone."""
        pairs = [
            (leaf.path, x)
            for slots in self.groups
            for leaf, x in zip(slots.group.leaves, slots.leaves, strict=True)
            if leaf.trainable and not x.requires_grad
        ]
        for _, x in pairs:
            x.requires_grad_()
        return [path for path, _ in pairs]

    def release(self) -> None:
        """Release the arena. The slots cannot be used afterwards."""
        self.arena = None
        for slots in self.groups:
            slots.full = slots.stage = slots.grad = slots.reduce_stage = slots.bound = None
            slots.grads, slots.gaps = [], []
            for leaf in slots.leaves:
                leaf.data = leaf.new_empty(0)
                attach_rows(leaf, None)


def cut(arena: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A 1-D view of ``numel`` elements at a byte offset of a uint8 arena."""
    return arena[offset : offset + numel * dtype.itemsize].view(dtype)


def storage_of(x: Tensor) -> int | None:
    """The identity of the storage of a tensor; None for one without, such as a sparse one."""
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def bind_rows(group: Group, buffer: Tensor, leaves: list[Tensor]) -> set[int]:
    """Make rounded rows of leaves views of a full buffer of bytes: payloads, and behind them scales.

    The leaves themselves are one nan in their shape.

    Returns:
        The identity of the storage of that.
    """
    payload, scales = buffer[: group.numel].view(FLOAT8), buffer[group.numel :].view(torch.float32)
    nothing = torch.full((1,), math.nan, dtype=group.compute_dtype, device=buffer.device)
    for start, leaf, tensor in zip(group.starts, group.leaves, leaves, strict=True):
        n, m = leaf.compute_shape
        tensor.data = nothing.expand(n, m)
        first = start // m
        attach_rows(tensor, (payload[start : start + n * m].view(n, m), scales[first : first + n].view(n, 1)))
    return {nothing.untyped_storage()._cdata}


def leaf_views(group: Group, buffer: Tensor) -> list[Tensor]:
    """Each leaf of a full flat buffer, in the shape that units read."""
    return [
        buffer[start : start + leaf.numel].view(leaf.compute_shape)
        for start, leaf in zip(group.starts, group.leaves, strict=True)
    ]


def unpack(group: Group, stage: Tensor, leaves: list[Tensor]) -> None:
    """Rank-major pieces of a ``dim`` group, ``(parts, chunk)``, to whole leaves."""
    for whole, pieces in _dim_views(group, stage, leaves):
        whole.copy_(pieces)


def pack(group: Group, leaves: list[Tensor], stage: Tensor) -> None:
    """Whole leaves to rank-major pieces: the inverse of ``unpack``. Elements that no leaf covers become zero."""
    stage.zero_()
    for whole, pieces in _dim_views(group, stage, leaves):
        pieces.copy_(whole)


def _dim_views(group: Group, stage: Tensor, leaves: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    rows, out = stage.view(group.parts, group.chunk), []
    for number, (leaf, tensor) in enumerate(zip(group.leaves, leaves, strict=True)):
        begin, end = group.shard_range(number, 0)
        dim = leaf.gather_dim or 0
        local = list(leaf.compute_shape)
        local[dim] //= group.parts
        pieces = rows[:, begin:end].view(group.parts, *local).movedim(0, dim)
        out.append((tensor.data.view(pieces.shape), pieces))
    return out
