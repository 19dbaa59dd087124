"""Buffers that a state holds for outer steps, beside those of the inner optimizer."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.optim import checks
from fshard.optim.base import Optimizer, State, States, Tensors
from fshard.optim.combinators import Inner
from fshard.optim.contract import contract, update_of
from fshard.optim.form import Form, LeafInfo
from fshard.state.exchanges import ANCHOR, Timetable

DELTA = "delta"
"""Of each replica: what it has sent and nobody has added yet, and between exchanges what rounding left of it."""

OUTER = "outer_"
"""How the names of the outer optimizer's buffers begin."""


@dataclass(frozen=True)
class Outer(Inner):
    """An optimizer whose state has the buffers of outer steps too. Its updates are those of the inner optimizer.

    Args:
        opt: the inner optimizer.
        outer: the outer one, which updates the anchor with the mean difference between it and the replicas.
        every: the steps between two exchanges of a fragment.
        over: the mesh axis of replicas.
        wire: the format in which differences travel; None for exact ones.
        fragments: their number, or patterns.
        delay: the steps for which a fragment is under way.
        mix: how much of its own values a replica keeps when a fragment arrives.
    """

    outer: Optimizer
    every: int
    over: str
    wire: str | None
    fragments: int | tuple[str, ...]
    delay: int
    mix: float

    def __post_init__(self) -> None:
        whole = checks.is_optimizer(self.outer) and not contract(self.outer).uniform
        found = [f"outer = {self.outer!r}: must update each element by itself, as fs.optim.sgd does"] if whole else []
        checks.require(self, *found, opt=checks.optimizer, outer=checks.optimizer)

    @property
    def table(self) -> Timetable:
        """Say when fragments leave and arrive."""
        number = self.fragments if isinstance(self.fragments, int) else len(self.fragments)
        return Timetable(self.every, self.delay, number)

    @property
    def keeps_delta(self) -> bool:
        """Tell whether something of a difference must be kept: while it is under way, or because it was rounded."""
        return self.delay > 0 or self.wire is not None

    def init(self, param: Tensor, hyper: Any) -> State:
        """The inner optimizer's buffers, the parameters as they are, and the outer optimizer's buffers for these."""
        anchor = param.to(torch.promote_types(param.dtype, torch.float32), copy=True)
        outer = {OUTER + name: value for name, value in contract(self.outer).init(anchor, None).items()}
        delta = {DELTA: torch.zeros_like(anchor)} if self.keeps_delta else {}
        return {**super().init(param, hyper), ANCHOR: anchor, **outer, **delta}

    def forms(self, hyper: Any) -> dict[str, Form]:
        """Return what the inner optimizer keeps, and what outer steps do."""
        outer = {OUTER + name: Form(wide=True, common=True) for name in contract(self.outer).forms(None)}
        delta = {DELTA: Form(wide=True)} if self.keeps_delta else {}
        return {**super().forms(hyper), ANCHOR: Form(wide=True, common=True), **outer, **delta}

    def problems(self, leaves: list[LeafInfo]) -> list[str]:
        """Those of both optimizers."""
        return [*super().problems(leaves), *contract(self.outer).problems(leaves)]

    def update(self, params: Tensors, grads: Tensors, states: States, *, step: int, hyper: Any, **more: Any) -> None:
        """The update of the inner optimizer; see ``Optimizer.update``."""
        update_of(self.opt)(params, grads, states, step=step, hyper=hyper, **more)
