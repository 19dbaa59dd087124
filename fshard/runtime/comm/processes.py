"""The ranks of a torch.distributed job: joining it, and the lanes between them."""

import datetime
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fshard.errors import PlanError
from fshard.runtime.clock import make_clock
from fshard.runtime.comm.gloo import GlooLane
from fshard.runtime.comm.lanes import Alone, Lane
from fshard.runtime.comm.nccl import NcclLane
from fshard.sharding.mesh import Axes, Mesh


@dataclass(frozen=True)
class Processes:
    """The ranks of a torch.distributed job. Lanes are process groups, made in the same order on all ranks."""

    mesh: Mesh
    backend: str
    timeout: datetime.timedelta
    owned: bool
    lanes: dict[tuple[str, Axes], Lane] = field(default_factory=dict)

    def lane(self, role: str, axes: Axes) -> Lane:
        """The process group of this role over these axes, made at the first call. ``control`` talks over gloo."""
        if self.mesh.axis_size(axes) == 1:
            return Alone()
        if (role, axes) not in self.lanes:
            backend = "gloo" if role == "control" and self.backend != "fake" else self.backend
            mine = None
            for ranks in self.mesh.partition(axes):
                group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
                mine = group if self.mesh.rank in ranks else mine
            name = f"{role}({'+'.join(axes)})"
            size = self.mesh.axis_size(axes)
            lane: Lane = GlooLane(name, size, mine)
            if backend != "gloo" and self.mesh.device.type == "cuda":
                lane = NcclLane(name, size, mine, make_clock(self.mesh.device))
            self.lanes[role, axes] = lane
        return self.lanes[role, axes]

    def close(self) -> None:
        """Destroy this transport's groups, and the default group if ``make_mesh`` made it."""
        for lane in self.lanes.values():
            if isinstance(lane, GlooLane | NcclLane) and dist.is_initialized():
                dist.destroy_process_group(lane.group)
        self.lanes.clear()
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def join(timeout: float) -> tuple[int, int, torch.device, str, bool] | None:
    """Join the job that torchrun's environment names, or take the process group that is there.

    Returns:
        ``(rank, world, device, backend, whether it was made here)``, or None without torchrun and process group.
    """
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(seconds=timeout))
        owned = True
    else:
        owned = False
    backend = str(dist.get_backend())
    if backend == "undefined":  # one for each device type: CUDA tensors go by NCCL, others by gloo
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend not in ("gloo", "nccl", "fake"):
        raise PlanError(f"the process group's backend is {backend!r}; fshard runs on gloo and nccl, and times on fake")
    gpu = backend == "nccl" or (backend == "fake" and torch.cuda.is_available())
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    return dist.get_rank(), dist.get_world_size(), device, backend, owned
