"""This rank's shards while a step runs: casts of them, and the leaves that are views of them."""

from collections.abc import Callable, Sequence
from weakref import ref

import torch
from torch import Tensor

from fshard.model.float8 import FLOAT8, rounded_rows
from fshard.runtime.comm import packing
from fshard.runtime.comm.packing import Kernels
from fshard.runtime.execution.shards import Shard, Shards
from fshard.runtime.memory.slots import Slots
from fshard.runtime.memory.step_memory import StepMemory
from fshard.sharding.layout import Group

MANY = 1 << 22
"""Elements that a device rounds at once: what it makes for that takes 13 bytes an element, and is let go of."""


class Resident:
    """This rank's shards, in the dtypes that units read.

    Args:
        memory: the memory of the step, with room for casts, and copies to and from host memory.
        kernels: compiled ones that pack.
    """

    def __init__(self, memory: StepMemory, kernels: Kernels = packing.no_kernels) -> None:
        self.casts, self.offload, self.kernels = memory.casts, memory.offload, kernels
        self.follow = memory.follow
        self.shards: Sequence[Shard] = ()
        self.fresh: set[int] = set()  # groups whose cast is that of the shard

    def start(self, shards: Sequence[Shard]) -> None:
        """Begin a step on these shards."""
        self.shards = shards
        self.fresh.clear()

    def read(self, group: Group) -> Tensor:
        """The shard of a group, cast at most once an update."""
        param, cast = self.shards[group.id].param, self.casts.get(group.id)
        if group.packed is not None and param.dtype != torch.uint8:  # made by code between passes, or of a tree
            return packing.packed(param, group.packed, self.kernels)
        if cast is None:
            return param
        if group.id not in self.fresh:
            if group.kinds.hosted:  # the cast of the step before, or the shard, may be on its way
                self.offload.synchronize(group, group.kinds.update == "device")
            convert(group, param, cast, self.kernels)
            self.fresh.add(group.id)
        return cast


def convert(group: Group, shard: Tensor, cast: Tensor, kernels: Kernels) -> None:
    """Make the copy of a shard that is gathered, or that units read."""
    form = group.wires.get("all_gather")
    if form is None:
        cast.copy_(shard)
    elif group.row:
        round_rows(group, shard, cast)
    else:
        (packing.pack if group.gathered else packing.rounded)(shard, form, cast, kernels)


def round_rows(group: Group, shard: Tensor, cast: Tensor) -> None:
    """Round the rows of a shard to float8, from the dtype of compute: payloads, and behind them scales."""
    rows = shard.view(-1, group.row)
    payload = cast[: shard.numel()].view(FLOAT8).view(rows.shape)
    scales = cast[shard.numel() :].view(torch.float32).unsqueeze(1)
    some = max(1, (packing.PIECE if packing.on_host(shard.device) else MANY) // group.row)
    for begin in range(0, len(rows), some):
        codes, factors = rounded_rows(rows[begin : begin + some].to(group.compute_dtype))
        payload[begin : begin + some].copy_(codes)
        scales[begin : begin + some].copy_(factors)


class Standing:
    """The groups that are not gathered: their leaves are views of this rank's shards, or of casts of them."""

    def __init__(self, slots: Slots, resident: Resident) -> None:
        self.groups = {one.group.id: one for one in slots.groups if not one.group.gathered}
        self.resident = resident
        self.converted = bool(resident.casts) or any([one.group.packed for one in self.groups.values()])
        self.bound: Callable[[], Shards | None] = lambda: None

    def bind(self, shards: Shards, waits: bool) -> None:
        """Make the leaves views of these shards; with ``waits``, of casts that will be made once these are updated."""
        if self.bound() is shards and not self.converted:
            return
        for group, slots in self.groups.items():
            cast = self.resident.casts.get(group) if waits and slots.group.trainable else None
            slots.bind_resident(self.resident.read(slots.group) if cast is None else cast)
        self.bound = ref(shards)
