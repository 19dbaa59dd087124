"""The needs of a program's compute ops, read off its run on fake tensors: activations, and arithmetic."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.comm import Done
from fshard.runtime.engine.flops import formula
from fshard.runtime.memory.activation_copies import Copied
from fshard.schedule.footprint import Need
from fshard.schedule.ops import Program
from fshard.torch_internals import TorchDispatchMode

_ATEN = torch.ops.aten

OVERWRITES = frozenset(
    [
        _ATEN.copy_.default,
        _ATEN._foreach_copy_.default,
        _ATEN.zero_.default,
        _ATEN._foreach_zero_.default,
        _ATEN.fill_.Scalar,
        _ATEN.fill_.Tensor,
    ]
)
"""Operators that write to their first argument, and do not read it."""


class _Bare:
    """The peak since a turn as unit graphs have it: see ``Need.bare``. Storages have numbers.

    Args:
        inside: whether a unit's function is running.

    Attributes:
        graded: gradients of leaves.
    """

    def __init__(self, inside: Callable[[], bool]) -> None:
        self.inside = inside
        self.first = 0
        self.changes: list[tuple[int, int]] = []  # a storage, and the bytes that come or go
        self.graded: set[int] = set()
        self.own: set[int] = set()  # made inside
        self.local: set[int] = set()  # let go of inside, too
        self.used: dict[int, int] = {}  # the changes before the end of the last operator that took a storage

    def begin(self, live: int) -> None:
        """A turn, with these bytes alive."""
        self.first = live
        self.changes.clear()
        self.used.clear()
        for held in (self.graded, self.own, self.local):
            held.clear()

    def begun(self, number: int, size: int) -> None:
        """A storage was made."""
        self.changes.append((number, size))
        self.use(number)
        if self.inside():
            self.own.add(number)

    def use(self, number: int) -> None:
        """An operator took it."""
        self.used[number] = len(self.changes)

    def ended(self, number: int, size: int) -> None:
        """It is gone."""
        if number in self.own and self.inside():
            self.local.add(number)
        self.changes.append((number, -size))

    def peak(self) -> int:
        """The most bytes."""
        early: dict[int, int] = {}  # by place among the changes, what a graph lets go of there
        for number, size in self.changes:
            if number in self.local and size < 0:
                early[self.used[number]] = early.get(self.used[number], 0) + size
        live = most = self.first
        for at, (number, size) in enumerate(self.changes):
            live += early.get(at, 0)
            live += 0 if number in self.graded or (number in self.local and size < 0) else size
            most = max(most, live)
        return most


class TracedCopies:
    """Copies of a trace: nothing is copied, and what comes back counts as made.

    Args:
        activations: what follows storages.

    Attributes:
        hosted: the bytes that move before and after the compute ops of calls, by kind, unit and call.
    """

    def __init__(self, activations: "Activations") -> None:
        self.activations = activations
        self.hosted: dict[tuple[str, str, int], int] = {}

    def leave(self, call: tuple[str, int], sources: Sequence[Tensor]) -> Copied:
        """Count what leaves."""
        return Copied(self._like("forward", call, sources), Done())

    def come(self, call: tuple[str, int], kept: Sequence[Tensor]) -> Copied:
        """Count what comes back."""
        targets = self._like("backward", call, kept)
        for target in targets:
            self.activations.note(target)
        return Copied(targets, Done())

    def drop(self, kept: Sequence[Tensor]) -> None:
        """Nothing was kept."""

    def _like(self, kind: str, call: tuple[str, int], tensors: Sequence[Tensor]) -> list[Tensor]:
        self.hosted[kind, *call] = sum([x.nbytes for x in tensors])
        with self.activations.outside():
            return [torch.empty_like(x) for x in tensors]

    def told(self, program: Program, needs: Sequence[Need]) -> tuple[Need, ...]:
        """The needs of a program's compute ops, with what moves."""
        ops = zip(program.computes, needs, strict=True)
        moved = self.hosted
        return tuple([replace(need, hosted=moved.get((op.kind, op.target, op.index), 0)) for op, need in ops])


class Activations(TorchDispatchMode):
    """Follows storages from the operator that makes them to their end, and counts floating-point operations.

    A storage counts from the first operator that returns it. What was there before does not: parameters, the batch.
    What an operator takes only for itself is not seen.

    Args:
        known: tensors that are there before.
        inside: whether a unit's function is running.

    Attributes:
        paused: whether what is made now does not count.
        again: floating-point operations of what the backward has computed again.
    """

    def __init__(self, known: list[Tensor], inside: Callable[[], bool] = lambda: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, tuple[Any, int]] = {}  # storages that are alive, and their numbers as they were made
        self.bare = _Bare(inside)
        self.made = 0
        self.live = self.peak = self.flops = self.moved = 0
        self.needs: list[Need] = []
        self.known: list[Any] = []
        self.seen: set[int] = set()
        self.paused = self.backward = False
        self.again = 0
        self.know(known)

    def know(self, tensors: Iterable[Tensor]) -> None:
        """These were there before, like parameters."""
        found = [x.untyped_storage() for x in tensors if x.layout is torch.strided]
        self.known += found  # kept, so that no other takes their place
        self.seen.update(storage._cdata for storage in found)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Count nothing that is made inside."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def begin_backward(self) -> None:
        """From here on, autograd runs the backward: only what it computes again runs in grad mode."""
        self.backward = True

    def turn(self) -> None:
        """One compute op is over, and the next begins."""
        self.needs.append(self.take())

    def take(self) -> Need:
        """Return what was needed since the turn before."""
        need = Need(self.peak, self.live, self.flops, self.moved, self.bare.peak())
        self.peak, self.flops, self.moved = self.live, 0, 0
        self.bare.begin(self.live)
        return need

    def gradients(self, tensors: Iterable[Tensor | None]) -> None:
        """These are gradients of leaves."""
        keys = (x.untyped_storage()._cdata for x in tensors if x is not None)
        self.bare.graded.update(self.held[key][1] for key in keys if key in self.held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then note what it made."""
        out = func(*args, **(kwargs or {}))
        if self.paused:
            return out
        for x in (out,) if isinstance(out, Tensor) else tree.leaves(out):
            if isinstance(x, Tensor):
                self.note(x)
        self._use(args)
        count = formula(func)
        if count is not None:
            flops = int(count(*args, **(kwargs or {}), out_val=out))
            self.flops += flops
            self.again += flops if self.backward and torch.is_grad_enabled() else 0
        elif not getattr(func, "is_view", False):
            made = _bytes(out) or _written(func, args)
            read = args[1:] if func in OVERWRITES else args
            self.moved += _bytes(read) + made if made else 0  # else it asks for a device, or the like
        return out

    def note(self, x: Tensor) -> None:
        """A tensor was made; its storage counts from here on, if it is new."""
        if x.layout is not torch.strided:
            return  # a sparse tensor: its parts were noted when they were made
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.held or key in self.seen:
            return
        size = storage.nbytes()
        self.made += 1
        self.held[key] = weakref.ref(storage, lambda _: self._gone(key, size)), self.made
        self.bare.begun(self.made, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _use(self, values: Any) -> None:
        """An operator took these."""
        for x in values:
            if isinstance(x, Tensor):
                held = self.held.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None
                if held is not None:
                    self.bare.use(held[1])
            elif isinstance(x, list | tuple):
                self._use(x)

    def _gone(self, key: int, size: int) -> None:
        _, number = self.held.pop(key)
        self.bare.ended(number, size)
        self.live -= size


def _bytes(values: Any) -> int:
    """The bytes of the tensors among some values."""
    if isinstance(values, Tensor):
        return values.numel() * values.element_size()
    return sum(map(_bytes, values)) if isinstance(values, tuple | list) else 0


def _written(func: Any, args: Sequence[Any]) -> int:
    """The bytes that an operator without results writes: fused updates have none, and write to what they are given.

    Gradients are among these in their schemas, but are written where a scale is given alone.
    """
    schema = getattr(func, "_schema", None)
    given = zip(schema.arguments, args, strict=False) if schema is not None and not schema.returns else ()
    return sum(_bytes(value) for known, value in given if _is_written(known) and known.name != "grads")


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors to whose memory an operator writes; none if its schema is not known."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for number, known in enumerate(schema.arguments):
        if _is_written(known):
            given = args[number] if number < len(args) else kwargs.get(known.name)
            yield from [x for x in tree.leaves(given) if isinstance(x, Tensor)]


def _is_written(known: Any) -> bool:
    return known.alias_info is not None and bool(known.alias_info.is_write)
