"""Lanes: communicators that move data as late as they may, and as early. What NCCL may do, and gloo never shows.

The contract of a collective is that between its start and its wait nobody reads or writes its output, and nobody writes
its input. A lazy lane sends nothing before the wait: outputs hold nan until then, and an input that has changed is an
error. An eager one delivers at the start, and overwrites at once what it may overwrite.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import fshard as fs
from fshard.runtime.comm.communicator import Done
from fshard.runtime.execution.actions import poison

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
