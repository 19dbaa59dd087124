"""Memory on the device and on its host: shards as they are kept, copies around an update, buffers that are given back.

Gradients have memory only in the backward, which frees activations. On a device, a buffer is returned to the caching
allocator after the compute stream has waited for the last use, so the allocator's order by stream is sufficient.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fshard.runtime.comm.packing import pack, unpack
from fshard.sharding.kinds import MemoryKind
from fshard.sharding.layout import Group
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan


def allocate(buffer: Tensor) -> None:
    """Give a buffer memory, if it has none. It and its views can then be used; their values are undefined."""
    storage = buffer.untyped_storage()
    if storage.nbytes() < buffer.nbytes:
        storage.resize_(buffer.nbytes)


@contextmanager
def with_memory(buffer: Tensor) -> Iterator[None]:
    """Memory for the time of a block, if there is none: a view can only be made of a buffer that has some."""
    bare = not buffer.untyped_storage().nbytes()
    allocate(buffer)
    try:
        yield
    finally:
        if bare:
            deallocate(buffer)


def deallocate(buffer: Tensor) -> None:
    """Free a buffer's memory. It and its views may not be used until it is allocated again."""
    buffer.untyped_storage().resize_(0)


@dataclass(frozen=True)
class MemorySpace:
    """The memory of a device, or of its host, page-locked or not."""

    device: torch.device
    pinned: bool = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of undefined values."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def keep(self, tensor: Tensor) -> Tensor:
        """The 1-D tensor itself if it is in this memory, else a copy in it."""
        if tensor.device == self.device and (not self.pinned or tensor.is_pinned()):
            return tensor
        return self.empty(tensor.numel(), tensor.dtype).copy_(tensor)


def memory_space(kind: MemoryKind, mesh: Mesh) -> MemorySpace:
    """The memory of this kind for a rank of a mesh."""
    if kind == "device":
        return MemorySpace(mesh.device)
    return MemorySpace(torch.device("cpu"), kind == "pinned_host" and mesh.device.type != "cpu")  # else it is traced


def same_memory(tensor: Tensor) -> Tensor:
    """A copy in memory of the same kind: ``clone`` does not keep memory page-locked."""
    pinned = tensor.device.type == "cpu" and tensor.is_pinned()
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor) if pinned else tensor.clone()


@dataclass(frozen=True)
class UpdateStaging:
    """Copies of what an update writes, made on the side where it runs, and written back after it.

    All copies are on the compute stream, so later work on it can use their memory.

    Attributes:
        space: the memory where the update runs.
        param: whether parameters are copied.
        opt: whether optimizer state is copied.
    """

    space: MemorySpace
    param: bool
    opt: bool

    def stage_in(self, param: Tensor, opt: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of what is in the other memory, and the other tensors themselves."""
        states = {name: self._copy(value) if self.opt else value for name, value in opt.items()}
        return self._copy(param) if self.param else param, states

    def stage_out(self, staged: tuple[Tensor, Mapping[str, Tensor]], param: Tensor, opt: Mapping[str, Tensor]) -> None:
        """Write the copies back."""
        with torch.no_grad():
            if self.param:
                param.copy_(staged[0], non_blocking=True)
            for name in opt if self.opt else ():
                opt[name].copy_(staged[1][name], non_blocking=True)

    def _copy(self, tensor: Tensor) -> Tensor:
        # The CPU reads copies on the host at once, so it waits for them; a device has its stream.
        out = self.space.empty(tensor.numel(), tensor.dtype)
        return out.copy_(tensor.detach(), non_blocking=self.space.device.type != "cpu")


def update_stagings(plan: Plan) -> dict[int, UpdateStaging]:
    """Say how updates stage what they write, by group id; groups that need no staging are left out."""
    return {group.id: _update_staging(group, plan.mesh) for group in plan.groups if group.update_staged}


def _update_staging(group: Group, mesh: Mesh) -> UpdateStaging:
    kinds = group.kinds
    pinned: MemoryKind = "pinned_host" if "pinned_host" in (kinds.param, kinds.opt) else "unpinned_host"
    return UpdateStaging(memory_space("device" if kinds.update == "device" else pinned, mesh), *kinds.moved)


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """The bytes that are free on a device, or on this host for all of its processes; None if that is not known.

    What PyTorch's allocator keeps of a device without using it is free, and so is what the kernel caches of files. A
    limit of the process' control group (version 2) counts as the size of the host.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu":
        return None
    known = [_of_host(root), _of_group(root)]
    return min((free for free in known if free is not None), default=None)


def _of_host(root: Path) -> int | None:
    rows = _numbers(root / "proc/meminfo")
    return rows["MemAvailable:"] * 1024 if "MemAvailable:" in rows else None


def _of_group(root: Path) -> int | None:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        path = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        folder = root / "sys/fs/cgroup" / path
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except (OSError, StopIteration):
        return None
    if not (limit.isdigit() and used.isdigit()):
        return None  # "max"
    rows = _numbers(folder / "memory.stat")
    return max(int(limit) - int(used) + rows.get("inactive_file", 0) + rows.get("active_file", 0), 0)


def _numbers(file: Path) -> dict[str, int]:
    """The number behind each first word of a file's lines."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def keep(group: Group, mesh: Mesh, values: Tensor) -> Tensor:
    """The shard that holds these values of a group's chunk: the values themselves, or in memory of its own packed."""
    if group.packed is None:
        return values
    return pack(values, group.packed, memory_space(group.kinds.param, mesh).empty(*group.kept))


def values_of(group: Group, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a group's chunk: the shard itself, or what it holds, unpacked, by default to the leaves' dtype."""
    if group.packed is None or shard.dtype != torch.uint8:
        return shard
    values = shard.new_empty(group.chunk, dtype=dtype or group.dtype)
    unpack(shard, group.packed, values)
    return values


def packed_parts(group: Group, shard: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """The codes and the scales of a range of a packed shard that begins with a block, and ends with one or a leaf."""
    form = group.packed
    assert form is not None
    end = -(-end // form.block) * form.block
    scales = shard[form.payload(group.chunk) :].view(torch.float32)
    return shard[form.payload(begin) : form.payload(end)], scales[begin // form.block : end // form.block]
