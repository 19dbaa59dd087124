"""One rank of many, the others of which are not there: a process group that sends nothing.

A gather of parameters finds its output as it is, and launches nothing. Before the first one at each place of memory,
the true values of all ranks are written there, once: so losses are those of a model, whose blocks all have the weights
of the first, as long as nobody else writes to that memory. (FSDP2 frees it after each gather.) Any other gather is a
message, which is answered as if all ranks had sent the same. A reduction takes this rank's own part, and an all-to-all
what this rank sends, by one copy. Collectives have a stream of their own, as NCCL's have, and ``wait`` orders the
current stream behind it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # registers "fake", which is made anew below

import fshard as fs
from fshard.runtime.comm.device_streams import Event, Stream, make_stream
from fshard.runtime.memory.slots import leaf_views

LEFT_OUT = (
    "of ranks that are not there: the time of collectives and the memory and processors that NCCL takes, the values "
    "of other ranks' gradients, and of FSDP2's gathers after its first step, so that its losses mean nothing; a gather "
    "launches nothing, a reduction one copy of a rank's own part"
)
"""What steps over this group do not show."""

Truth = dict[tuple[int, torch.dtype], Tensor]
"""The outputs of gathers of parameters, by their size and dtype."""


class Arrival(dist.Work):
    """A collective that is over on its stream. It keeps what it works on until it was waited for, as NCCL's does."""

    def __init__(self, stream: Stream, over: Event | None, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.stream, self.over, self.tensors = stream, over, list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """Order the current stream behind the collective. The host goes on."""
        self.stream.wait_for((self.over,))
        self.tensors.clear()
        return True


class Silent(dist.ProcessGroup):
    """A process group of which only the first rank is there.

    Args:
        size: the number of ranks.
        truth: what gathers of parameters give.
        streams: makes the stream of a device.
    """

    def __init__(self, size: int, truth: Truth, streams: Callable[[torch.device], Stream] = make_stream) -> None:
        super().__init__(0, size)
        self.truth, self.streams = truth, streams
        self.made: dict[torch.device, Stream] = {}
        self.name = ""
        self.filled: set[tuple[int, int, torch.dtype]] = set()

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """The name that others have for ranks that are not there."""
        return "fake"

    @property
    def group_name(self) -> str:
        """As torch.distributed has named it; it asks once more while it forgets the group."""
        self.name = str(dist.distributed_c10d._world.pg_names.get(self, self.name))
        return self.name

    def shutdown(self) -> None:
        """Nothing is in flight."""

    abort = shutdown

    def _run(self, work: Callable[[], object], *tensors: Tensor) -> Arrival:
        """Do some work on this group's stream, behind the current one."""
        device = tensors[0].device
        stream = self.made.get(device) or self.made.setdefault(device, self.streams(device))
        with stream.after((stream.record(),)):
            work()
            over = stream.record()
        return Arrival(stream, over, tensors)

    def _allgather_base(self, out: Tensor, shard: Tensor, *options: Any) -> Arrival:
        return self._run(lambda: self._gathered(out, shard), out, shard)

    def _gathered(self, out: Tensor, shard: Tensor) -> None:
        """Give an output its values where it has none yet."""
        whole = self.truth.get((out.numel(), out.dtype))
        if whole is None:
            out.view(self.size(), -1).copy_(shard.reshape(1, -1))
            return
        place = (out.data_ptr(), out.numel(), out.dtype)
        if place not in self.filled:
            self.filled.add(place)
            out[shard.numel() :].copy_(whole[shard.numel() :])
            if out.data_ptr() != shard.data_ptr():  # FSDP2 gathers in place
                out[: shard.numel()].copy_(shard)

    def _reduce_scatter_base(self, out: Tensor, full: Tensor, *options: Any) -> Arrival:
        return self._run(lambda: out.copy_(full.view(-1)[: out.numel()].view(out.shape)), out, full)

    def alltoall_base(self, out: Tensor, full: Tensor, *options: Any) -> Arrival:
        """What this rank sends."""
        return self._run(lambda: out.view(-1).copy_(full.view(-1)[: out.numel()]), out, full)

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> Arrival:
        """The values of this rank, as they are."""
        return self._run(lambda: None, *tensors)

    broadcast = allreduce
    # PyTorch 2.13 has other names for two of them.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def barrier(self, *options: Any) -> Arrival:
        """Nobody comes."""
        return Arrival(Stream(), None, ())


def join(world: int, truth: Truth | None = None) -> Truth:
    """Be rank 0 of a group of so many ranks.

    Args:
        world: the number of ranks.
        truth: what gathers of parameters give; may be filled after this call.

    Returns:
        The truth.
    """
    known: Truth = {} if truth is None else truth

    def create(store: Any, rank: int, size: int, timeout: Any) -> Silent:
        return Silent(size, known)

    dist.Backend.register_backend("fake", create, devices=["cpu", "cuda"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return known


def truth_of(peer: Any, whole: Mapping[str, Tensor]) -> Truth:
    """What the gathers of a peer give, before its first step.

    Args:
        peer: of ``peers``, this library's or FSDP2's.
        whole: each parameter, by its name in the module that the peer was made of.
    """
    return of_plan(peer.plan, whole) if hasattr(peer, "plan") else of_fsdp2(peer.module, whole, dist.get_world_size())


def of_plan(plan: fs.Plan, whole: Mapping[str, Tensor]) -> Truth:
    """What the gathers of a plan give: the full buffers of its groups.

    Args:
        plan: whose groups are flat.
        whole: each parameter, by its path.
    """
    found: Truth = {}
    for group in plan.groups:
        buffer = torch.zeros(group.parts * group.chunk, dtype=group.compute_dtype)
        for leaf, view in zip(group.leaves, leaf_views(group, buffer), strict=True):
            view.copy_(whole[leaf.path])
        found.setdefault((buffer.numel(), buffer.dtype), buffer)
    return found


def of_fsdp2(module: torch.nn.Module, whole: Mapping[str, Tensor], world: int) -> Truth:
    """What the gathers of FSDP2 give: for each rank the parts of a group's parameters, padded.

    Args:
        module: to which ``fully_shard`` was applied.
        whole: each parameter, by its name before that.
        world: the number of ranks.
    """
    names = {id(leaf): name for name, leaf in module.named_parameters()}
    found: Truth = {}
    for part in module.modules():
        if not isinstance(part, torch.distributed.fsdp.FSDPModule):
            continue
        group: Any = part._get_fsdp_state()._fsdp_param_group
        if group is None:
            continue
        rows: list[list[Tensor]] = [[] for _ in range(world)]
        dtype = part._get_fsdp_state()._mp_policy.param_dtype
        for param in group.fsdp_params:
            value = whole[names[id(param.sharded_param)].removesuffix("._orig_mod")]
            size = -(-len(value) // world)
            padded = torch.cat([value, value.new_zeros(size * world - len(value), *value.shape[1:])])
            for rank, chunk in enumerate(padded.split(size)):
                rows[rank].append(chunk.reshape(-1))
        buffer = torch.cat([one for row in rows for one in row])
        buffer = buffer.to(dtype or buffer.dtype)
        found.setdefault((buffer.numel(), buffer.dtype), buffer)
    return found
