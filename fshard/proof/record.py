"""The outputs of units: in a step, as its engine runs them, and in plain calls on ordinary tensors."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from fshard import tree
from fshard.model.casting import make_casting
from fshard.model.unit import Slot, Unit, attach
from fshard.runtime.engine.engine import Engine, Sink, Traits
from fshard.runtime.engine.remat import Remat
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class Output:
    """The output of one call of a unit.

    Attributes:
        unit: the unit's name.
        microbatch: the microbatch of this rank.
        call: the number of the call in the microbatch.
        tensors: its tensors, on the host.
    """

    unit: str
    microbatch: int
    call: int
    tensors: tuple[Tensor, ...]


@dataclass
class Record:
    """The calls of a step on this rank, in order. Another engine, which runs the program again, clears it."""

    calls: list[Output] = field(default_factory=list)
    engine: Any = None

    def note(self, engine: Engine, unit: str, call: int, result: Any) -> None:
        """Keep the output of a call."""
        if engine is not self.engine:
            self.engine = engine
            self.calls.clear()
        microbatch = int(getattr(engine.executor, "microbatch", 0))
        self.calls.append(Output(unit, microbatch, call, tensors_of(result)))

    def drop(self) -> None:
        """Release the engine."""
        self.engine = None


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """Copies of a result's tensors, on the host."""
    found = [x.detach() for x in tree.leaves(result) if isinstance(x, Tensor)]
    return tuple(x.to("cpu", copy=True) for x in found)


class RecordingEngine(Engine):
    """An engine that records the outputs of units."""

    def __init__(self, plan: Plan, sink: Sink, remat: Remat, traits: Traits, record: Record) -> None:
        super().__init__(plan, sink, remat, traits)
        self.record = record

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the unit and record its output."""
        if self.inside or self.differentiating or peek_interpreter_stack() is not None:
            return super().call(unit, params, args, kwargs)
        result = super().call(unit, params, args, kwargs)
        self.record.note(self, self.units.called(unit, params).name, sum(self.counts.values()) - 1, result)
        return result


class PlainUnits:
    """Runs units as ordinary functions and reports their outputs.

    Args:
        plan: the plan, which gives the casts around units.
        hear: a function of the number of a call and its result.
    """

    def __init__(self, plan: Plan, hear: Callable[[int, Any], None]) -> None:
        self.plan, self.hear = plan, hear
        self.inside = self.listening = False
        self.count = 0
        self.casting = make_casting(plan.precision, {path: leaf.precision for path, leaf in plan.leaves.items()})

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the unit's function. Calls in a unit belong to the outer unit; calls in a transform are silent."""
        if self.inside or not self.listening or peek_interpreter_stack() is not None:
            return unit.fn(params, *args, **kwargs)
        self.inside = True
        try:
            result = unit.fn(params, *args, **kwargs)
        finally:
            self.inside = False
        self.hear(self.count, result)
        self.count += 1
        return result

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Report calls inside of this context: later calls, such as in a backward, compute an output again."""
        self.listening = True
        try:
            yield
        finally:
            self.listening = False

    def tree(self, leaves: dict[str, Tensor]) -> dict[str, Any]:
        """The parameter tree of ordinary tensors whose units call this object."""
        for path, tensor in leaves.items():
            attach(tensor, Slot(self, path, self.casting, self.plan.leaves[path].shape))
        return tree.nest({path: leaves[path] for path in self.plan.leaves})


def recording(record: Record) -> Callable[[Plan, Sink, Remat, Traits], Engine]:
    """A factory of engines that write to a record."""
    return functools.partial(RecordingEngine, record=record)


def gap(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors' elements, and the largest magnitude of the second; nan equals nan."""
    if one.shape != other.shape:
        return float("inf"), 0.0
    if not one.numel():
        return 0.0, 0.0
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.detach().to(wide), other.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    size = torch.where(b.abs().isfinite(), b.abs(), 0.0)
    return float(far.max()), float(size.max())
