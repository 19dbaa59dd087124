"""Four played ranks on one GPU: the real NCCL communicators, whose process groups copy memory on late side streams.

Each rank computes on a stream of its own. A collective runs on a stream of its group, behind the streams of its ranks,
and fills its outputs with nan first. In one run all collectives are late, in another all compute. All schedules and
layouts give the bits of ranks that all work on one stream, in program order.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.runtime.comm.device_streams import make_stream
from fshard.runtime.comm.nccl import NcclCommunicator
from fshard.runtime.execution.actions import poison
from tests.gpu.place import Found, Place
from tests.runtime.test_lanes import CASES, ROWS, WIDTH, Case, made, params
from tests.shared.model_streams import staged, substitute

RANKS, STEPS = 4, 3
LATE = 1.0
"""Milliseconds of a delay."""


@dataclass(frozen=True)
class Lane:
    """What the ranks of one process group share.

    Attributes:
        place: where it is.
        late: milliseconds before data move.
        stream: on which they move.
        over: an event after each collective.
    """

    place: Place
    late: float
    stream: Any
    over: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A collective in flight, which keeps what it works on until it was waited for."""

    lane: Lane
    handle: Any
    tensors: list[Tensor]

    def wait(self) -> None:
        """Let the other ranks come, and the current stream wait."""
        self.handle.wait()
        if not self.lane.place.dry:
            torch.cuda.current_stream(self.lane.place.device).wait_event(self.lane.over[self.handle.collective])
        self.tensors.clear()


@dataclass(frozen=True)
class Group:
    """One rank's part of a process group: its collectives run on the lane, behind the stream that is current."""

    inner: Any
    lane: Lane

    def run(self, call: str, reads: list[Tensor], writes: list[Tensor], *args: Any) -> Work:
        """A collective, whose data move when the last rank has come."""
        place, stream = self.lane.place, self.lane.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(place.device))
        with place.on(stream):
            for tensor in writes if call != "all_reduce" else ():
                if not any(_overlap(tensor, other) for other in reads):
                    poison(tensor)
            place.sleep(self.lane.late)
            handle = getattr(self.inner, call)(*args)
            if handle.collective.complete and stream is not None:
                self.lane.over[handle.collective] = stream.record_event()
        return Work(self.lane, handle, [*reads, *writes])

    def abort(self) -> None:
        """Nothing to end: the scheduler of played ranks sees who does not come."""


@dataclass(frozen=True)
class LaneTransport:
    """A transport whose collectives are those of NCCL on lanes; control messages are as they are."""

    inner: Any
    place: Place
    late: float
    lanes: dict[Any, Lane]
    made: dict[Any, Any] = field(default_factory=dict)
    asynchronous: bool = True

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """The real NCCL communicator of a rank on a lane."""
        inner = self.inner.communicator(role, axes)
        if inner.size == 1 or role.startswith("control"):
            return inner
        if (role, axes) not in self.made:
            key = role, inner.members
            if key not in self.lanes:
                self.lanes[key] = Lane(self.place, self.late, self.place.stream())
            group = Group(inner, self.lanes[key])
            self.made[role, axes] = NcclCommunicator(inner.name, inner.size, group, make_stream(self.place.device))
        return self.made[role, axes]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def trained(place: Place, case: Case, late: float | None, slow: float = 0.0) -> Any:
    """Steps on four played ranks: all numbers and parameters of rank 0.

    Args:
        place: the device.
        case: what is trained.
        late: milliseconds of each collective; None for all of it in program order, on one stream.
        slow: milliseconds before each pass.
    """
    lanes: dict[Any, Lane] = {}

    def loss(p: Any, batch: Tensor) -> Tensor:
        place.sleep(slow)
        return case.fn(p, batch)

    def rank() -> Any:
        mesh = fs.make_mesh(*case.axes)
        where = Place(torch.device("cpu")) if late is None else place  # where streams do nothing
        mesh = dataclasses.replace(mesh, transport=LaneTransport(mesh.transport, where, late or 0.0, lanes))
        with place.on(None if late is None else place.stream()):
            return _steps(mesh, case, loss)

    with pytest.MonkeyPatch.context() as change:
        substitute(change)
        if place.dry:
            change.setattr("fshard.runtime.steps.programs.stage_numel", staged)
        return fs.virtual_mesh(*case.axes, device=place.device).run(rank)[0]


def _steps(mesh: fs.Mesh, case: Case, loss: Any) -> Any:
    plan, opt = made(mesh, case.rules, case.precision, case.wire), fs.optim.adamw(1e-2)
    state = fs.init_state(plan, opt, params=params())
    step = fs.make_train_step(loss, opt, plan, **{**case.options, "debug": True})
    numbers = []
    for number in range(STEPS):
        whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        state, metrics = step(state, whole.chunk(mesh.size)[mesh.rank].to(mesh.device))
        numbers += [metrics.loss.item(), metrics.grad_norm.item()]
    leaves = tree.leaves(fs.unshard(fs.settle(state).params, plan))
    return numbers, [leaf.cpu().tolist() for leaf in leaves]


def run(place: Place, found: Found) -> None:
    """Every layout under every schedule."""
    place.deterministic()
    if place.dry:
        found.leave("streams: all ranks run on the CPU in program order, so nothing is late")
    names: Sequence[str] = [*CASES][:: place.of(1, 5, 30)]
    for name in names:
        with found.trying(name):
            case = _on_four(CASES[name], place)
            want = trained(place, case, None)
            found.check(all(number == number for number in want[0]), f"{name}: {want[0]}")
            for how, late, slow in (("late collectives", LATE, 0.0), ("late compute", 0.0, 5 * LATE)):
                got = trained(place, case, late, slow)
                found.check(got == want, f"{name}, {how}: {_apart(got, want)}")
        found.number("cases", names.index(name) + 1)


def _on_four(case: Case, place: Place) -> Case:
    """The same with four ranks, and page-locked memory where there is a GPU."""
    axes = case.axes if len(case.axes[0]) > 1 else ((RANKS,), case.axes[1])
    if place.dry:
        return dataclasses.replace(case, axes=axes)
    kinds = ("memory_kind", "opt_memory_kind")
    rules = [
        dataclasses.replace(rule, **{k: "pinned_host" for k in kinds if getattr(rule, k) == "unpinned_host"})
        for rule in case.rules
    ]
    return dataclasses.replace(case, axes=axes, rules=rules)


def _apart(got: Any, want: Any) -> str:
    """What differs most."""
    pairs = itertools.chain(zip(got[0], want[0], strict=True), *map(_flat, got[1], want[1]))
    return f"{got[0]} where {want[0]} was expected; at most {max(abs(a - b) for a, b in pairs):.3g} apart"


def _flat(got: Any, want: Any) -> Any:
    return zip(torch.tensor(got).view(-1).tolist(), torch.tensor(want).view(-1).tolist(), strict=True)


def _overlap(a: Tensor, b: Tensor) -> bool:
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes
