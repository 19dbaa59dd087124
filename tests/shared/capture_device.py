"""A capture device: the host's memory, with captures as CUDA has them, for ``Policy(graph=)`` without a GPU.

A capture records operators with the raw addresses of the memory that they work on, and does no work: what is written in
place keeps its value, and what is made is nan. Memory that is made in a capture belongs to its pool. It is poisoned
where it is freed, in each replay, and never given to anybody else. A replay does the recorded work at the recorded
addresses. Memory from before the capture must still be where it was. Collectives are recorded, too; or, where the
capture is cut, issued by the host between two segments, and an error inside of one.

As on CUDA, what reads the device while it is captured is an error.
"""

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

import fshard as fs
from fshard.runtime.comm import Done
from fshard.runtime.comm.host_calls import HostCall

ATEN = torch.ops.aten
DEALLOCATES = (
    *(f"fshard.runtime.execution.{module}" for module in ("actions", "replica_sums", "shards")),
    *("fshard.runtime.memory.slots", "fshard.runtime.memory.step_memory"),
)
"""The modules that free the memory of buffers."""

ALLOCATES = (*DEALLOCATES[:2], "fshard.runtime.memory.slots")
"""The modules that give it."""

CONTROL = ("control", "checkpoint")
"""Roles of communicators whose messages lie on the host."""


def at_address(x: Tensor) -> Tensor:
    """A tensor of the CPU on the memory of another one, found by its address."""
    size = _span(x)
    made = torch.empty(0, dtype=x.dtype, device="cpu")
    if not size:
        return made.view(x.shape)
    storage = torch._C._construct_storage_from_data_pointer(x.data_ptr(), torch.device("cpu"), size)
    return made.set_(storage, 0, x.shape, x.stride())


def _span(x: Tensor) -> int:
    """The bytes from the first element of a tensor to its last."""
    if not x.numel():
        return 0
    return (sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1) * x.element_size()


def poison(x: Tensor) -> None:
    """Fill a tensor with what nobody can take for a value."""
    if x.dtype.is_floating_point:
        x.fill_(math.nan)


@dataclass(frozen=True)
class Record:
    """An operator, with the memory that it works on.

    Attributes:
        name: of the operator, or of the collective, or "poison".
        numbers: what it is given beside tensors.
        addresses: the memory that it is given, and makes.
        run: does its work.
    """

    name: str
    numbers: tuple[Any, ...]
    addresses: tuple[tuple[int, int], ...]
    run: Callable[[], object] = field(compare=False, repr=False)


class RecordedGraph:
    """The work of one capture.

    Attributes:
        records: what was issued, in order.
        pool: memory that was made in the capture.
        outside: memory from before it: the storage, its address, and the first operator that works on it.
        most: the most bytes of the pool that are in use at once. ``given`` are buffers that have some of them.
        cuts: the names of calls of the host between its segments.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.pool: dict[int, Any] = {}
        self.live: dict[int, None] = {}
        self.outside: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.replays = self.level = self.most = 0
        self.given: set[int] = set()
        self.cuts: list[str] = []

    def takes(self, nbytes: int) -> None:
        """The pool gives memory, or takes it back."""
        self.level += nbytes
        self.most = max(self.most, self.level)

    def replay(self) -> None:
        """Do the work."""
        for memory, address, name in self.outside.values():
            assert not memory.expired(), f"memory is gone that the graph works on, first in {name}"
            now = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
            assert now is not None and now.data_ptr() == address, f"memory has moved that {name} works on"
        self.replays += 1
        with torch.no_grad(), _disable_current_modes():
            for record in self.records:
                record.run()

    def normal(self) -> list[tuple[Any, ...]]:
        """The records, with memory of the pool numbered in the order in which it is met: equal where graphs are."""
        bases = sorted((storage.data_ptr(), storage.nbytes()) for storage in self.pool.values())
        numbers: dict[int, int] = {}

        def place(address: int, size: int) -> tuple[int, int, int]:
            for base, nbytes in bases:
                if base <= address < base + max(nbytes, 1):
                    return numbers.setdefault(base, -1 - len(numbers)), address - base, size
            return address, 0, size

        return [(one.name, one.numbers, tuple(place(*at) for at in one.addresses)) for one in self.records]


class CaptureDevice(TorchDispatchMode):
    """What captures on one rank, in the place of ``CudaCapture``.

    Attributes:
        graphs: all that were captured.
        fails: raises in the next capture, at this operator, where it is not None.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.kind = device.type
        self.graph: RecordedGraph | None = None
        self.graphs: list[RecordedGraph] = []
        self.fails: int | None = None
        self.buffers: dict[int, Any] = {}  # storages whose memory stays, since a graph works on it

    def capture(self, run: Callable[[Any], Any]) -> tuple[Callable[[], None], Any]:
        """Record what a function issues."""
        self.graph = graph = RecordedGraph()
        try:
            with self:
                result = run(self._cut)
                with _disable_current_modes():
                    self._sweep()
        finally:
            self.graph = None
        self.graphs.append(graph)
        return graph.replay, result

    def _cut(self, call: HostCall) -> None:
        """End a segment, and begin the next one."""
        assert self.graph is not None
        with _disable_current_modes():
            self._sweep()
        self.graph.cuts.append(call.name)
        self._note(f"host: {call.name}", (), [*call.tensors], call.run)

    @property
    def replayed(self) -> int:
        """The number of replays of all graphs."""
        return sum(graph.replays for graph in self.graphs)

    def deallocate(self, buffer: Tensor, real: Callable[[Tensor], None]) -> None:
        """Free the memory of a buffer; in a capture it stays, and what is in it goes."""
        key = buffer.untyped_storage()._cdata
        if self.graph is not None:
            if buffer.untyped_storage().nbytes():
                assert key in self.buffers, "a graph frees memory from before its capture, and would use it again"
                x = at_address(buffer)
                self._note("poison", (), [x], lambda: poison(x))
            if key in self.graph.given:
                self.graph.given.discard(key)
                self.graph.takes(-buffer.untyped_storage().nbytes())
        elif key not in self.buffers:
            real(buffer)
        elif buffer.untyped_storage().nbytes():
            poison(at_address(buffer))

    def allocate(self, buffer: Tensor, real: Callable[[Tensor], None]) -> None:
        """Give a buffer memory; in a capture it is the graph's."""
        key = buffer.untyped_storage()._cdata
        if self.graph is not None and not buffer.untyped_storage().nbytes():
            self.buffers[key] = buffer.untyped_storage()
        real(buffer)
        if self.graph is not None and key in self.buffers and key not in self.graph.given:
            self.graph.given.add(key)
            self.graph.takes(buffer.untyped_storage().nbytes())

    def collective(self, name: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """A collective: done at once, or recorded."""
        if self.graph is None:
            return method(*args)
        assert not self.graph.cuts, f"{name} is issued inside of a segment"
        tensors = [x for x in args if isinstance(x, Tensor)]
        plain = tuple(map(str, (x for x in args if not isinstance(x, Tensor))))
        for x in tensors:
            self._know(x, name)
        given = [at_address(x) if isinstance(x, Tensor) and self.kind == "cpu" else x for x in args]
        self._note(name, plain, tensors, lambda: method(*given).wait())
        return Done()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.graph is None or not self._here(given, kwargs):
            return func(*args, **kwargs)
        self._sweep()
        if self.fails is not None:
            self.fails -= 1
            if self.fails < 0:
                self.fails = None
                raise RuntimeError("operation not permitted when stream is capturing")
        self._refuse(func, args, given)
        with _disable_current_modes():
            return self._taken(func, args, kwargs, given)

    def _taken(self, func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        for x in given:
            self._know(x, str(func))
        fresh = [ret.alias_info is None for ret in func._schema.returns]
        if func._schema.is_mutable and not any(fresh):
            self._operator(func, args, kwargs, [])
            return _written(func, args, kwargs)
        if func._schema.is_mutable:
            copies = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
            out = func(*copies[0], **copies[1])
        else:
            out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if any(x.device.type != self.kind for x in made):
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        storages = {x.untyped_storage()._cdata for x in given}
        if made and all(x.untyped_storage()._cdata in storages for x in made):
            return out  # a view
        for x in made:
            key = x.untyped_storage()._cdata
            self.graph.pool[key] = x.untyped_storage()  # type: ignore[union-attr]
            self.graph.live[key] = None  # type: ignore[union-attr]
            self.graph.takes(x.untyped_storage().nbytes())  # type: ignore[union-attr]
            poison(at_address(x))
        self._operator(func, args, kwargs, made)
        return out

    def _here(self, given: list[Tensor], kwargs: Any) -> bool:
        if any(type(x) not in (Tensor, torch.nn.Parameter) or x.device.type == "meta" for x in given):
            return False  # fake tensors
        device = kwargs.get("device")
        if device is not None and not given:
            return torch.device(device).type == self.kind
        return any(x.device.type == self.kind for x in given) or (not given and self.kind == "cpu")

    def _refuse(self, func: Any, args: Any, given: list[Tensor]) -> None:
        """What CUDA does not let a capture do."""
        reads = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags}
        if reads or func is ATEN.copy_.default and len({x.device.type for x in given if x.ndim}) > 1:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")

    def _operator(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Record an operator on the addresses of its arguments; what it makes is copied to where it was made."""
        name = str(func)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        numbers = tuple(str(x) for x in tree_leaves((args, kwargs)) if not isinstance(x, Tensor))
        raw_args, raw_kwargs = tree_map(self._raw, (args, kwargs))
        if "device" in raw_kwargs:
            raw_kwargs["device"] = torch.device("cpu")
        outs = [at_address(x) for x in made]

        def run() -> None:
            if func._schema.name.partition("::")[2].startswith(("empty", "new_empty")):
                for out in outs:
                    poison(out)
                return
            found = [x for x in tree_leaves(func(*raw_args, **raw_kwargs)) if isinstance(x, Tensor)]
            for out, one in zip(outs, found, strict=False):
                out.copy_(one)

        self._note(name, numbers, [*given, *made], run)

    def _raw(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return at_address(x) if x.device.type == self.kind else x.clone()

    def _note(self, name: str, numbers: tuple[Any, ...], tensors: list[Tensor], run: Callable[[], object]) -> None:
        addresses = tuple((x.data_ptr(), _span(x)) for x in tensors)
        self.graph.records.append(Record(name, numbers, addresses, run))  # type: ignore[union-attr]

    def _know(self, x: Tensor, name: str) -> None:
        """Memory that is not of the pool must stay where it is."""
        graph, storage = self.graph, x.untyped_storage()
        if graph is None or storage._cdata in graph.pool or storage._cdata in graph.outside or not storage.nbytes():
            return
        if x.device.type == self.kind:
            graph.outside[storage._cdata] = StorageWeakRef(storage), storage.data_ptr(), name

    def _sweep(self) -> None:
        """Note what was freed."""
        graph = self.graph
        assert graph is not None
        for key in [key for key in graph.live if torch._C._storage_Use_Count(key) <= 1]:
            del graph.live[key]
            storage = graph.pool[key]
            at, size = storage.data_ptr(), storage.nbytes()
            graph.takes(-size)
            raw = torch._C._construct_storage_from_data_pointer(at, torch.device("cpu"), size)
            x = torch.empty(0, dtype=torch.uint8, device="cpu").set_(raw)
            self._note("poison", (), [x], lambda x=x: x.fill_(255))  # nan in all dtypes


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator in place returns: the arguments that it writes to."""
    names = [argument.name for argument in func._schema.arguments]
    by_name = {**dict(zip(names, args, strict=False)), **kwargs}
    found = []
    for ret in func._schema.returns:
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.before_set == ret.alias_info.before_set:
                found.append(by_name[argument.name])
                break
    return None if not found else found[0] if len(found) == 1 else tuple(found)


@dataclass(frozen=True)
class CaptureTransport:
    """A transport whose collectives a capture records."""

    inner: Any
    device: CaptureDevice

    def communicator(self, role: str, axes: tuple[str, ...]) -> Any:
        """The communicator of a role."""
        inner = self.inner.communicator(role, axes)
        return inner if inner.size == 1 or role.startswith(CONTROL) else CaptureCommunicator(inner, self.device, role)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class CaptureCommunicator:
    """A communicator whose calls a capture records."""

    inner: Any
    device: CaptureDevice
    role: str

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
            return method
        return lambda *args: self.device.collective(f"{name} of {self.role}", method, args)


@contextmanager
def capturing() -> Iterator[Callable[[fs.Mesh], tuple[fs.Mesh, CaptureDevice]]]:
    """While it lasts, ``Policy(graph="step")`` captures on the devices of meshes that the function has given back."""
    by_thread: dict[int, CaptureDevice] = {}

    def on(mesh: fs.Mesh) -> tuple[fs.Mesh, CaptureDevice]:
        device = by_thread[threading.get_ident()] = CaptureDevice(mesh.device)
        transport = mesh.transport
        return (mesh if transport is None else replace(mesh, transport=CaptureTransport(transport, device))), device

    with pytest.MonkeyPatch.context() as change:
        change.setattr(
            "fshard.runtime.whole_graph.device_capture.capture_of", lambda device: by_thread.get(threading.get_ident())
        )
        for name, rooms in (("allocate", ALLOCATES), ("deallocate", DEALLOCATES)):
            for room in rooms:
                real = getattr(__import__(room, fromlist=[name]), name)

                def called(buffer: Tensor, real: Any = real, name: str = name) -> None:
                    device = by_thread.get(threading.get_ident())
                    real(buffer) if device is None else getattr(device, name)(buffer, real)

                change.setattr(f"{room}.{name}", called)
        yield on


def differences(first: RecordedGraph, second: RecordedGraph) -> list[str]:
    """What differs between two captures of a step."""
    pairs = itertools.zip_longest(first.normal(), second.normal())
    return [f"op {at}: {a} != {b}" for at, (a, b) in enumerate(pairs) if a != b]
