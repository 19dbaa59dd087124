"""A model of streams by vector clocks: whether all accesses of memory that conflict are ordered.

The real runtime runs, and its streams, events and waits are this model's. An access happens on a stream; its clock says
what of the others it has waited for. Two accesses of the same bytes, one of which writes, must be ordered by
these clocks, whatever the speed of the streams. So must be the free of memory: the allocator gives it to the stream
that it came from. (Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978; Mattern, 1989.)

``drop`` names one event or wait of the runtime, or all of one kind, which then do nothing: the model must find what
they were for.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fshard as fs

PACKAGE = str(Path(fs.__file__).parent)
COMPUTE, OTHER, HOST = "compute", "another compute", "host"
Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """A read or a write of some bytes."""

    low: int
    high: int
    writes: bool
    stream: str
    time: int
    what: str

    def conflicts(self, other: "Access") -> bool:
        """Whether the order of the two matters."""
        return (self.writes or other.writes) and self.low < other.high and other.low < self.high


@dataclass(eq=False)
class Memory:
    """The accesses of one storage that a later one may conflict with, and a reference that does not keep it.

    Attributes:
        home: the stream that its memory was made on, to which it returns.
        users: the streams that the allocator was told of: it waits for them before it gives the memory away.
    """

    alive: StorageWeakRef
    home: str = ""
    users: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """An event: what had happened on a stream."""

    clocks: "Clocks"
    clock: Clock
    epoch: int = 0

    def synchronize(self) -> None:
        """The host waits."""
        self.clocks.captures(self, "the host waits in a capture")
        if self.clocks.does(f"wait of the host: {caller()}"):
            self.clocks.join(HOST, self.clock)


class Clocks(TorchDispatchMode):
    """The clocks of one rank. While it is entered, operators are accesses on the current stream.

    Attributes:
        drop: the event or wait, or the kind, that does nothing.
        sites: all events and waits of the run.
        races: pairs of accesses that nothing orders.
        epoch: begins and ends of captures so far: odd inside of one.
    """

    def __init__(self, device: torch.device, drop: str = "") -> None:
        super().__init__()
        self.device, self.drop = device, drop
        self.now: dict[str, Clock] = {}
        self.current, self.off = COMPUTE, 0
        self.compute = COMPUTE
        self.memories: dict[int, Memory] = {}
        self.shared: set[int] = set()  # storages that more than one stream has used
        self.sites: set[str] = set()
        self.races: dict[str, None] = {}
        self.epoch = 0

    # -- captures -----------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Inside, work is captured on another compute stream, whose graph the compute stream is given.

        At its end all streams must have joined that one.
        """
        self.join(OTHER, self.clock(COMPUTE))
        before = {stream: dict(clock) for stream, clock in self.now.items()}
        self.epoch += 1
        try:
            with self.on(OTHER):
                yield
        finally:
            self.epoch += 1
        for stream, clock in self.now.items():
            late = clock.get(stream, 0) > max(self.clock(OTHER).get(stream, 0), before.get(stream, {}).get(stream, 0))
            if late and stream != HOST:
                self.races[f"{stream} has not joined the capture at its end"] = None

    def captures(self, mark: Mark | None, what: str) -> None:
        """Note a wait that a capture does not take: for an event from before it, or of the host."""
        if self.epoch % 2 and (mark is None or what or mark.epoch != self.epoch):
            self.races[f"{what or 'an event from before the capture is waited for'}: {caller()}"] = None

    # -- clocks -------------------------------------------------------------------------------------------------------

    def clock(self, stream: str) -> Clock:
        """What a stream has waited for."""
        return self.now.setdefault(stream, {})

    def join(self, stream: str, clock: Clock) -> None:
        """A stream waits."""
        self.swept()
        own = self.clock(stream)
        for other, time in clock.items():
            own[other] = max(own.get(other, 0), time)

    def does(self, site: str) -> bool:
        """Whether an event or a wait of the runtime takes place."""
        self.sites.add(site)
        return site != self.drop and not site.startswith(f"{self.drop}: ")

    def record(self) -> Mark | None:
        """An event after what was issued on the current stream, named by who asks for it."""
        return Mark(self, dict(self.clock(self.current)), self.epoch) if self.does(f"event: {caller()}") else None

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Inside, operators run on this stream."""
        before = self.current, self.compute
        self.current = stream
        if stream in (COMPUTE, OTHER):
            self.compute = stream
        try:
            yield
        finally:
            self.current, self.compute = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is noted: data of all ranks move."""
        self.off += 1
        try:
            yield
        finally:
            self.off -= 1

    # -- accesses -----------------------------------------------------------------------------------------------------

    def touch(self, tensor: Tensor, writes: bool, what: str, stream: str | None = None, made: bool = False) -> None:
        """A tensor is read or written on a stream; the current one, or the host for its own memory. Or it is made."""
        if not tensor.numel() or isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        stream = stream or self.current
        storage = tensor.untyped_storage()
        memory = self._memory(storage, stream if made and stream != HOST else self.compute)
        low = tensor.data_ptr()
        spans = zip(tensor.shape, tensor.stride(), strict=True)
        high = low + (sum((n - 1) * step for n, step in spans) + 1) * tensor.element_size()
        self._note(memory, Access(low, high, writes, stream, self._tick(stream), what))
        if stream != COMPUTE:
            self.shared.add(storage._cdata)

    def _tick(self, stream: str) -> int:
        clock = self.clock(stream)
        if stream != HOST:  # it was issued by the host
            for other, time in self.clock(HOST).items():
                clock[other] = max(clock.get(other, 0), time)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def _memory(self, storage: Any, home: str) -> Memory:
        found = self.memories.get(storage._cdata)
        if found is not None and found.alive.expired():
            self._freed(found)
            found = None
        if found is None:
            found = self.memories[storage._cdata] = Memory(StorageWeakRef(storage))
        if not found.home:
            found.home = home
        return found

    def _note(self, memory: Memory, access: Access) -> None:
        clock, left = self.clock(access.stream), []
        for other in memory.accesses:
            ordered = clock.get(other.stream, 0) >= other.time
            if not ordered and access.conflicts(other):
                pair = f"{access.what} on {access.stream} is not ordered behind {other.what} on {other.stream}"
                self.races[pair] = None
            covered = ordered and access.low <= other.low and other.high <= access.high
            if not (covered and (access.writes or not other.writes)):
                left.append(other)
        memory.accesses = [*left, access]

    def _freed(self, memory: Memory) -> None:
        clocks = [self.clock(stream) for stream in (memory.home or COMPUTE, HOST, *memory.users)]  # the host frees
        for other in memory.accesses:
            if max(clock.get(other.stream, 0) for clock in clocks) < other.time and other.stream != HOST:
                self.races[f"memory is freed that {other.what} on {other.stream} may still use"] = None
        memory.accesses, memory.home = [], ""
        memory.users.clear()

    def keep(self, tensor: Tensor) -> None:
        """The allocator is told that the current stream uses the memory of a tensor."""
        if tensor.untyped_storage().nbytes() and self.does(f"memory in use: {caller()}"):
            memory = self._memory(tensor.untyped_storage(), self.compute)
            if memory.home != self.current:
                memory.users.add(self.current)
                self.shared.add(tensor.untyped_storage()._cdata)

    def swept(self) -> None:
        """Find memory that was freed since the last look, before anybody waits for anything more."""
        for key in [key for key in self.shared if self.memories[key].alive.expired()]:
            self._freed(self.memories.pop(key))
            self.shared.discard(key)

    def resized(self, tensor: Tensor) -> None:
        """The memory of a buffer is given back, while the buffer stays."""
        memory = self.memories.get(tensor.untyped_storage()._cdata)
        if memory is not None:
            self._freed(memory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.off:
            return out
        self.swept()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        name = f"{func} at {caller()}"
        if func is torch.ops.aten._local_scalar_dense.default:
            self.join(HOST, self.clock(self._stream(given)))
        if func._schema.is_mutable:
            written = {id(x) for x in _written(func, args, kwargs or {})}
        elif made and all(_aliases(x, given) for x in made):
            return out  # a view
        else:
            written = set()
        stream = self._stream([*given, *made])
        for x in given:
            self.touch(x, id(x) in written, name, stream)
        for x in made:
            if not any(x is one for one in given):
                self.touch(x, True, name, stream, made=True)
        results = [*made, *(x for x in given if id(x) in written)]
        to_host = (
            stream != HOST and self.device.type != "cpu" and any(x.device.type == "cpu" for x in results if x.ndim)
        )
        if to_host and not _in_flight(func, args):
            self.join(HOST, self.clock(stream))  # PyTorch waits for the copy
        return out

    def _stream(self, tensors: Iterable[Tensor]) -> str:
        return HOST if self.device.type != "cpu" and all(x.device.type == "cpu" for x in tensors) else self.current


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _in_flight(func: Any, args: Any) -> bool:
    """Whether it is a copy with ``non_blocking=True``."""
    copies = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
    return func in copies and len(args) > 2 and bool(args[2])


def _aliases(x: Tensor, given: Iterable[Tensor]) -> bool:
    return any(x is one or x.untyped_storage()._cdata == one.untyped_storage()._cdata for one in given)


def caller() -> str:
    """The functions of the package that are under way, innermost first."""
    frame, found = sys._getframe(1), list[str]()
    while frame is not None and len(found) < 2:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith(("comm/device_streams.py", "comm/nccl.py")):
            found.append(f"{frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "the loss"
