"""Failures at each part of a step function that knows nothing of them: what makes parts is replaced.

The calls of parts are numbered as a step makes them. A failure comes before a call, inside of the function of a pass,
in its backward, or in the update rule; or the loss of a pass is nan.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fshard as fs
from tests.parts.ways import asking

PASSES, ARITHMETIC = ("value_and_grad", "make_eval_step"), ("add", "scale", "vdot", "norm")


@dataclass
class Fault:
    """A failure that waits for its point, on one rank.

    Attributes:
        point: where it fails: ``"before 3"``, ``"inside 3"``, ``"backward 3"``, ``"nan 3"``, ``"rule"``, ``"end"``.
        calls: the kinds of the calls of the latest step.
        updates: whether the rule has updated anything on this rank in the latest steps.
    """

    point: str = ""
    calls: list[str] = field(default_factory=list)
    updates: bool = False

    def here(self, point: str) -> bool:
        """Whether it is the point, for the first time."""
        found = point == self.point
        self.point = "" if found else self.point
        return found

    def hit(self, point: str) -> None:
        """Fail here, if it is the point."""
        if self.here(point):
            raise ValueError(f"injected {point}")

    def points(self) -> list[str]:
        """All points of such a step."""
        out = []
        trained = "make_update" in self.calls
        for number, kind in enumerate(self.calls):
            out.append(f"before {number}")
            out += [f"inside {number}"] if kind in PASSES else []
            out += [f"backward {number}"] if kind == "value_and_grad" else []
            out += [f"nan {number}"] if kind in PASSES and trained else []
        return [*out, *["rule"] * trained, "end"]


FAULT: ContextVar[Fault] = ContextVar("fault")
"""The failure of this rank: played ranks are threads of one process."""


@dataclass(frozen=True)
class Rule(fs.optim.sgd):
    """An update rule that fails when it is told to."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update, or fail before anything is written."""
        FAULT.get().updates = True
        FAULT.get().hit("rule")
        super().update(*args, **kwargs)


class Backward(torch.autograd.Function):
    """The identity, whose backward may fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault, number: int) -> Tensor:
        ctx.fault, ctx.number = fault, number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.fault.hit(f"backward {ctx.number}")
        return grad, None, None


def _inside(fn: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """The function of a pass, which fails at its points."""

    def fails(params: Any, batch: Any) -> Any:
        fault = FAULT.get()
        number = len(fault.calls) - 1
        fault.hit(f"inside {number}")
        out = fn(params, batch)
        if fault.here(f"nan {number}"):
            out = fs.tree.map(lambda x: x * torch.nan, out)
        return Backward.apply(out, fault, number) if kind == "value_and_grad" else out

    return fails


def _numbered(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """A part whose calls are counted."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        fault = FAULT.get()
        fault.calls.append(kind)
        fault.hit(f"before {len(fault.calls) - 1}")
        return call(*args, **kwargs)

    return counted


def _failing(make: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        first, *rest = args
        first = _inside(first, kind) if kind in PASSES else first
        return _numbered(make(first, *rest, **kwargs), kind)

    return made


def _step(make: Callable[..., Any], how: str) -> Callable[..., Any]:
    def made(fn: Any, plan: fs.Plan) -> Any:
        def whole(state: Any, batch: Any) -> Any:
            FAULT.get().calls.clear()
            returned = fn(state, batch)
            FAULT.get().hit("end")
            return returned

        return make(asking(whole) if how == "asking" else whole, plan)

    return made


@contextmanager
def injected(how: str) -> Iterator[None]:
    """Steps and parts that are made here can fail. With ``"asking"`` no trace finds the schedule of the steps."""
    with ExitStack() as stack:
        for kind in (*PASSES, "make_update"):
            stack.enter_context(patch.object(fs, kind, _failing(getattr(fs, kind), kind)))
        for kind in ARITHMETIC:
            stack.enter_context(patch.object(fs.tree, kind, _numbered(getattr(fs.tree, kind), kind)))
        stack.enter_context(patch.object(fs, "make_step", _step(fs.make_step, how)))
        yield
