"""Communication. The only module that imports torch.distributed.

A *transport* joins the ranks of a mesh; a *lane* is one communicator for one role over some of its axes, so that
gathers, reduces and control messages never queue behind each other. Every collective is asynchronous: it returns a
*handle*, and ``handle.wait()`` makes the result safe to read for the work that follows.
"""

import datetime
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fshard.errors import CommError, PlanError
from fshard.runtime.clock import Clock, Mark, make_clock
from fshard.sharding.mesh import Axes, Mesh

Marks = Iterable[Mark | None]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Make its result safe to read. Raises ``CommError`` if it failed or timed out."""


class Lane(Protocol):
    """One communicator. All tensors are contiguous; ``after`` holds the marks that must be passed first."""

    @property
    def size(self) -> int:
        """The number of ranks that it joins."""

    def all_gather(self, out: Tensor, shard: Tensor, after: Marks = ()) -> Handle:
        """``out`` = the shards of all ranks, one after the other. Its adjoint is ``reduce_scatter``."""

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Marks = ()) -> Handle:
        """``out`` = this rank's chunk of the sum over ranks, added to what it holds if ``add``.

        ``full`` and ``stage`` may be overwritten.
        """

    def all_reduce(self, buffer: Tensor, after: Marks = ()) -> Handle:
        """``buffer`` = its sum over ranks."""


class Transport(Protocol):
    """What joins the ranks of a mesh."""

    def lane(self, role: str, axes: Axes) -> Lane:
        """The communicator of a role (``gather``, ``reduce``, ...) over these axes; made once, collectively."""

    def close(self) -> None:
        """Leave. Collective."""


@dataclass(frozen=True)
class Done:
    """The handle of something that is already there."""

    def wait(self) -> None:
        """Nothing to wait for."""


@dataclass(frozen=True)
class Alone:
    """The lane of one rank: collectives are copies."""

    size: int = 1

    def all_gather(self, out: Tensor, shard: Tensor, after: Marks = ()) -> Handle:
        """Copy."""
        out.copy_(shard)
        return Done()

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Marks = ()) -> Handle:
        """Copy, or add."""
        _bring(out, [full], add)
        return Done()

    def all_reduce(self, buffer: Tensor, after: Marks = ()) -> Handle:
        """Nothing: the sum over one rank."""
        return Done()


@dataclass(frozen=True)
class LocalTransport:
    """A world of one rank, without a process group."""

    def lane(self, role: str, axes: Axes) -> Lane:
        """Every lane of one rank is alike."""
        return Alone()

    def close(self) -> None:
        """Nothing was joined."""


@dataclass(frozen=True)
class Pending:
    """A c10d collective under way, and what turns what arrived into the result."""

    work: Any
    describe: str
    finish: Callable[[], object] | None = None

    def wait(self) -> None:
        """Wait as long as the communicator's timeout, then finish."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise CommError(f"{self.describe} failed: {str(error).splitlines()[0]}") from error
        if self.finish is not None:
            self.finish()


@dataclass(frozen=True)
class GlooLane:
    """A gloo communicator.

    gloo's own reduce-scatter is an all-reduce: twice the bytes, and it runs inside ``wait``. Here every rank sends each
    peer its chunk and adds what it receives, in rank order: the fewest bytes, and the same sum on every run.
    """

    name: str
    size: int
    group: Any

    def all_gather(self, out: Tensor, shard: Tensor, after: Marks = ()) -> Handle:
        """Ring all-gather on gloo's own thread."""
        return self._issue("all-gather", lambda: _all_gather(out, shard, self.group))

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Marks = ()) -> Handle:
        """All-to-all into ``stage``, then one sum over ranks."""
        rows = list(stage.view(self.size, -1))
        return self._issue(
            "reduce-scatter",
            lambda: dist.all_to_all_single(stage, full, group=self.group, async_op=True),
            lambda: _bring(out, rows, add),
        )

    def all_reduce(self, buffer: Tensor, after: Marks = ()) -> Handle:
        """Ring all-reduce in place."""
        return self._issue("all-reduce", lambda: dist.all_reduce(buffer, group=self.group, async_op=True))

    def _issue(self, what: str, start: Callable[[], Any], finish: Callable[[], object] | None = None) -> Handle:
        describe = f"{what} on {self.name}"
        try:
            return Pending(start(), describe, finish)
        except RuntimeError as error:
            raise CommError(f"{describe} failed: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class NcclLane:
    """An NCCL communicator with a stream of its own. Not yet measured on hardware."""

    name: str
    size: int
    group: Any
    clock: Clock

    def all_gather(self, out: Tensor, shard: Tensor, after: Marks = ()) -> Handle:
        """NCCL all-gather on this lane's stream."""
        with self.clock.lane(after):
            return Pending(_all_gather(out, shard, self.group), f"all-gather on {self.name}")

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Marks = ()) -> Handle:
        """NCCL reduce-scatter on this lane's stream; by way of ``stage`` if it adds."""
        target = stage[: out.numel()] if add else out
        finish = (lambda: out.add_(target)) if add else None
        with self.clock.lane(after):
            return Pending(_reduce_scatter(target, full, self.group), f"reduce-scatter on {self.name}", finish)

    def all_reduce(self, buffer: Tensor, after: Marks = ()) -> Handle:
        """NCCL all-reduce on this lane's stream."""
        with self.clock.lane(after):
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            return Pending(work, f"all-reduce on {self.name}")


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
            backend = "gloo" if role == "control" else self.backend
            mine = None
            for ranks in self.mesh.partition(axes):
                group = dist.new_group(list(ranks), timeout=self.timeout, backend=backend)
                mine = group if self.mesh.rank in ranks else mine
            name = f"{role}({'+'.join(axes)})"
            size = self.mesh.axis_size(axes)
            lane: Lane = GlooLane(name, size, mine)
            if backend == "nccl":
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
    if backend not in ("gloo", "nccl"):
        raise PlanError(f"the process group's backend is {backend!r}; fshard runs on gloo and nccl")
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
    return dist.get_rank(), dist.get_world_size(), device, backend, owned


def exchange(lane: Lane, row: Tensor) -> Tensor:
    """The rows of all ranks of a control lane, ``(ranks, n)``: small, synchronous, the same on all of them."""
    if lane.size == 1:
        return row.view(1, -1)
    rows = row.new_empty(lane.size * row.numel())
    lane.all_gather(rows, row.contiguous()).wait()
    return rows.view(lane.size, row.numel())


def exchange_text(lane: Lane, text: str, width: int = 2048) -> Sequence[str]:
    """The texts of all ranks, each cut to ``width`` bytes."""
    data = text.encode()[:width].ljust(width, b"\0")
    rows = exchange(lane, torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _bring(out: Tensor, rows: Sequence[Tensor], add: bool) -> None:
    """``out`` = (its value if ``add``, plus) the rows added in order. ``out`` may be the first row."""
    rest = rows
    if not add:
        if len(rows) == 1:
            out.copy_(rows[0])
        else:
            torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    for row in rest:
        out.add_(row)


# PyTorch 2.13 renamed the two collectives on flat tensors and deprecates the old names, which 2.11 and 2.12 have.
def _all_gather(out: Tensor, shard: Tensor, group: Any) -> Any:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, shard, group=group, async_op=True)


def _reduce_scatter(out: Tensor, full: Tensor, group: Any) -> Any:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, full, group=group, async_op=True)
