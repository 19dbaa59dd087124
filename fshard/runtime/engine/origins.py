"""Origins of numbers that are not finite: the first operators of a pass that made them, in debug mode.

A mode of PyTorch sees each operator that code of the user runs, and autograd after it. What the executor runs between
units is not looked at: freed memory is full of nan there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.engine.engine import Engine, Executor, Sink, Traits
from fshard.runtime.engine.remat_rules import Remat
from fshard.sharding.plan import Plan
from fshard.torch_internals import TorchDispatchMode, of_zeros

TOLD: dict[str, Callable[[Tensor], Tensor]] = {"nan": torch.isnan, "inf": torch.isinf}
"""The kinds of numbers that are not finite."""

PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that are looked at."""

GIVEN = frozenset({"empty", "new_empty", "fill", "full", "new_full", "masked_fill", "index_fill", "scalar_tensor"})
"""Operators that write what they are given, as masks of attention are, or that leave memory as it was."""


@dataclass
class Origins:
    """The first operators of a step that made nan, and inf.

    Attributes:
        found: by kind, a line's words.
        paused: whether what runs is not the program's.
    """

    found: dict[str, str] = field(default_factory=dict)
    paused: bool = False

    def told(self) -> str:
        """Return what an error says of them; empty where nothing was found."""
        return "; ".join(f"the first {kind} comes from {text}" for kind, text in self.found.items())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Look at nothing that runs inside: it is not the program's."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before


class Looking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the results of operators.

    Args:
        origins: what is found.
        place: says where the program is.
    """

    def __init__(self, origins: Origins, place: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.origins, self.place = origins, place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if its results are not finite where its arguments are."""
        kwargs, found = kwargs or {}, self.origins.found
        left = [kind for kind in TOLD if kind not in found]
        if self.origins.paused or not left or _writes_what_is_given(func):
            return func(*args, **kwargs)
        given = tree.leaves((args, kwargs))
        if func._schema.is_mutable:  # afterwards its arguments are its results
            left = [kind for kind in left if not _any(kind, given)]
        result = func(*args, **kwargs)
        for kind in left:
            if _any(kind, tree.leaves(result)) and (func._schema.is_mutable or not _any(kind, given)):
                found[kind] = f"torch.ops.{func} of {_shapes(given)} in {self.place()}"
        return result


def _shapes(values: Iterable[Any]) -> str:
    return ", ".join(str(list(x.shape)) for x in values if isinstance(x, Tensor)) or "no tensor"


def _writes_what_is_given(func: Any) -> bool:
    name = str(func).removeprefix("aten.").partition(".")[0].rstrip("_")
    return name.removesuffix("_like").removesuffix("_strided") in GIVEN


def _any(kind: str, values: Iterable[Any]) -> bool:
    """Tell whether any element of these tensors is of a kind. Tensors that cannot be asked have none.

    Those of other classes are not asked: a DTensor would ask other ranks, which may have no question at that place.
    """
    for value in values:
        if isinstance(value, float) and kind in str(value):
            return True
        if type(value) not in PLAIN or value.layout is not torch.strided or of_zeros(value):
            continue
        if value.is_meta or not (value.is_floating_point() or value.is_complex()):
            continue
        try:
            if bool(TOLD[kind](value).any()):
                return True
        except (RuntimeError, NotImplementedError):  # dtypes of 8 bits
            continue
    return False


@dataclass(frozen=True)
class _Apart:
    """An executor whose own operators are not the program's."""

    executor: Executor
    origins: Origins

    def reach(self, kind: str, unit: str, index: int) -> None:
        with self.origins.pause():
            self.executor.reach(kind, unit, index)

    def settle(self) -> None:
        with self.origins.pause():
            self.executor.settle()

    def readable(self, groups: Sequence[int]) -> bool:
        return self.executor.readable(groups)

    def outside(self, group: int) -> bool:
        with self.origins.pause():
            return self.executor.outside(group)


class DebuggedEngine(Engine):
    """An engine that notes where numbers stop being finite.

    Units that run as compiled graphs are not looked into.

    Args:
        origins: what is found.
    """

    def __init__(self, plan: Plan, sink: Sink, remat: Remat, traits: Traits, origins: Origins) -> None:
        super().__init__(plan, self._sunk, remat, traits)
        self.origins, self.gradients = origins, sink
        self.fresh = True

    def _sunk(self, group: int, numbers: list[int], grads: list[Tensor | None]) -> None:
        with self.origins.pause():
            self.gradients(group, numbers, grads)

    def start(self, executor: Executor) -> None:
        """Begin a pass; see ``Engine``."""
        if self.fresh:
            self.origins.found.clear()
        self.fresh = False
        super().start(_Apart(executor, self.origins))

    def stop(self) -> None:
        """The program is over; see ``Engine``."""
        self.fresh = True
        super().stop()

    def run(self, fn: Callable[..., Any], batch: Any, train: bool) -> Any:
        """The result of the program; see ``Engine``."""
        if self.graphs is not None:
            return super().run(fn, batch, train)
        with Looking(self.origins, self._place):
            return super().run(fn, batch, train)

    def differentiate(self, total: Tensor, seed: Tensor) -> None:
        """Run the backward; see ``Engine``."""
        if self.graphs is not None:
            return super().differentiate(total, seed)
        with Looking(self.origins, self._place):
            return super().differentiate(total, seed)

    def _place(self) -> str:
        unit = self.inside or self.under_way
        where = f"unit {unit}" if unit else "code outside of units"
        return f"the backward of {where}" if self.differentiating and not self.inside else where


@dataclass(frozen=True)
class Debugging:
    """Makes the engines of a step in debug mode.

    Attributes:
        origins: what they find.
    """

    origins: Origins = field(default_factory=Origins)

    def __call__(self, plan: Plan, sink: Sink, remat: Remat, traits: Traits) -> Engine:
        return DebuggedEngine(plan, sink, remat, traits, self.origins)
