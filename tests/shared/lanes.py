"""Lanes: communicators that move data as late as they may, and as early. What NCCL may do, and gloo never shows.

The contract of a collective is that between its start and its wait nobody reads or writes its output, and nobody writes
its input. A lazy lane sends nothing before the wait: outputs hold nan until then, and an input that has changed is an
error. An eager one delivers at the start, and overwrites at once what it may overwrite.
"""

import ctypes
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import fshard as fs
from fshard.runtime.comm.communicator import Done
from fshard.runtime.execution.actions import poison
from fshard.runtime.memory.activation_copies import ActivationCopies, Copied

Start = Callable[[], Any]


class LaneError(AssertionError):
    """The contract of a collective was broken."""


@dataclass(eq=False)
class Late:
    """A collective that begins when it is waited for.

    Attributes:
        name: for errors.
        inputs: what it sends, each with its values at the start.
        back: memory that the collective itself reads, and its values: they are put back before it begins.
        start: begins it.
        spent: what it may overwrite.
    """

    name: str
    inputs: list[tuple[Tensor, Tensor]]
    back: list[tuple[Tensor, Tensor]]
    start: Start
    spent: list[Tensor] = field(default_factory=list)
    over: bool = False

    def wait(self) -> None:
        """Check what it sends, and do it all now."""
        if self.over:
            return
        self.over = True
        for tensor, before in self.inputs:
            if not _same(tensor, before):
                raise LaneError(f"{self.name}: an input has changed between start and wait")
        for tensor, before in self.back:
            tensor.copy_(before)
        self.start().wait()
        for tensor in self.spent:
            poison(tensor)


@dataclass(frozen=True)
class Lane:
    """A communicator around another.

    Attributes:
        inner: the communicator that moves the data.
        name: of it.
        lazy: whether it moves them at the wait, or at the start.
        seen: notes every collective.
    """

    inner: Any
    name: str
    lazy: bool
    seen: list[str]

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.inner.size)

    def all_gather(self, out: Tensor, shard: Tensor, after: Any = ()) -> Any:
        """Every rank's shard, late or early."""
        return self._started("all-gather", [out], [shard], lambda: self.inner.all_gather(out, shard))

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Any = ()) -> Any:
        """The sum of chunks, late or early; what it sent is spent then."""
        spent = [] if _overlap(full, out) else [full]
        back = [out] if add else []
        start = lambda: self.inner.reduce_scatter(out, full, stage, add)  # noqa: E731
        return self._started("reduce-scatter", [out], [full], start, spent, back)

    def all_reduce(self, buffer: Tensor, after: Any = ()) -> Any:
        """The sum, late or early."""
        return self._started("all-reduce", [buffer], [], lambda: self.inner.all_reduce(buffer), back=[buffer])

    def all_to_all(self, out: Tensor, full: Tensor, receive: Any, send: Any, after: Any = ()) -> Any:
        """Chunks, late or early."""
        return self._started("all-to-all", [out], [full], lambda: self.inner.all_to_all(out, full, receive, send))

    def _started(
        self,
        call: str,
        outs: list[Tensor],
        inputs: list[Tensor],
        start: Start,
        spent: list[Tensor] | None = None,
        back: list[Tensor] | None = None,
    ) -> Any:
        self.seen.append(f"{call} on {self.name}")
        if not self.lazy:
            start().wait()
            for tensor in spent or ():
                poison(tensor)
            return Done()
        # An input that lies in the output, as in a gather in place, stays; all the rest of the output is undefined.
        kept = [(x, x.clone()) for x in inputs]
        held = [(x, x.clone()) for x in back or ()]
        for out in outs:
            poison(out)
        for tensor, before in kept:
            if any(_overlap(tensor, out) for out in outs):
                tensor.copy_(before)
        return Late(f"{call} on {self.name}", kept, held, start, spent or [])


class LaneCopies(ActivationCopies):
    """Copies of activations that take a lane.

    A lazy one copies nothing before the wait: what it writes is nan until then, and a source that has changed, or whose
    memory has been freed, is an error.
    """

    def leave(self, call: Any, sources: Sequence[Tensor]) -> Copied:
        """To the host, at the wait."""
        kept = [self.pool.take(source.nbytes) for source in sources]
        return Copied(kept, LateCopy(f"the way of {call[0]} to the host", sources, kept))

    def come(self, call: Any, kept: Sequence[Tensor]) -> Copied:
        """Back, at the wait."""
        targets = [torch.empty_like(buffer) for buffer in kept]
        return Copied(targets, LateCopy(f"the way of {call[0]} back", kept, targets))


class LateCopy:
    """A copy of bytes that begins when it is waited for. It keeps no source: the runtime must."""

    def __init__(self, name: str, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.name, self.targets = name, list(targets)
        self.sources = [(StorageWeakRef(x.untyped_storage()), x.data_ptr(), x.clone()) for x in sources]
        for target in targets:
            target.fill_(255)  # every floating-point dtype reads all ones as nan

    def wait(self) -> None:
        """Check what is copied, and copy it now."""
        for (alive, at, before), target in zip(self.sources, self.targets, strict=True):
            if alive.expired():
                raise LaneError(f"{self.name}: a source was freed before its copy was over")
            now = (ctypes.c_ubyte * before.numel()).from_address(at)
            if bytes(now) != before.numpy().tobytes():
                raise LaneError(f"{self.name}: a source has changed between start and wait")
            target.copy_(before)
        self.sources.clear()


@contextmanager
def copies(lane: str) -> Iterator[None]:
    """Inside, copies of activations take a lane: "lazy", or "plain" and "eager", which are at once."""
    with pytest.MonkeyPatch.context() as change:
        if lane == "lazy":
            change.setattr("fshard.runtime.steps.programs.ActivationCopies", LaneCopies)
        yield


@dataclass(frozen=True)
class LaneTransport:
    """A transport whose transfers take a lane; control messages are as they are."""

    inner: Any
    lazy: bool
    seen: list[str]
    asynchronous: bool = False

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """A lane around the communicator."""
        made = self.inner.communicator(role, axes)
        if made.size == 1 or role.startswith("control"):
            return made
        return Lane(made, f"{role}({'+'.join(axes)})", self.lazy, self.seen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def laned(mesh: fs.Mesh, lane: str) -> Iterator[tuple[fs.Mesh, list[str]]]:
    """A rank's mesh with a lane: "plain", "lazy" or "eager"; and the collectives that took it."""
    seen: list[str] = []
    transport = mesh.transport if lane == "plain" else LaneTransport(mesh.transport, lane == "lazy", seen)
    yield dataclasses.replace(mesh, transport=transport), seen


def _same(tensor: Tensor, before: Tensor) -> bool:
    return bool(
        (tensor.view(-1) == before.view(-1)).logical_or_(tensor.isnan().view(-1) & before.isnan().view(-1)).all()
    )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes
