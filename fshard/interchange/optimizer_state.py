"""Optimizer state by name: which of a source's tensors becomes which buffer of which leaf.

``torch.optim`` names state by parameter and buffer, ``state.blocks.0.weight.exp_avg``, once the integers of its state
dicts are replaced by names; fshard names it by buffer and leaf. The buffers have the same names.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fshard.checkpoint.ranges import Block
from fshard.errors import DamagedError, TreeError, lines
from fshard.interchange.source import Origin, TensorSource, fits, load, read_piece
from fshard.optim.base import Optimizer
from fshard.sharding.plan import Plan
from fshard.state.entries import Entry
from fshard.state.train_state import TrainState

STEP = "step"
"""torch's name of the number of updates of a parameter."""


def load_with_optimizer(
    plan: Plan,
    opt: Optimizer,
    params: TensorSource,
    optim: TensorSource | None,
    *,
    step: int | None,
    cast: bool,
    **options: Any,
) -> TrainState:
    """A state of parameters and of optimizer state from sources; without ``optim`` the optimizer's state is new."""
    if optim is None:
        return load(plan, opt, params, step=step or 0, cast=cast, **options)
    reader = OptimizerReader(plan, optim, "state.", cast)
    if step is None:
        step = reader.step(list(params.tensors))
    state = load(plan, opt, params, step=step, cast=cast, fill=reader.fill, **options)
    reader.check()
    return replace(state, late=reader.late(state))


class OptimizerReader:
    """Fills the entries of an optimizer's state from a source, and records what does not fit.

    Args:
        plan: the plan.
        source: the optimizer's state, named ``{prefix}{parameter}.{buffer}``.
        prefix: the beginning of the names.
        cast: whether floating-point tensors may be rounded.
    """

    def __init__(self, plan: Plan, source: TensorSource, prefix: str, cast: bool) -> None:
        self.plan, self.source, self.prefix, self.cast = plan, source, prefix, cast
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}  # of updates, by the source's names of parameters
        self.names: dict[str, str | None] = {}  # of leaves with state; None for a new leaf

    def fill(self, entry: Entry, origins: Mapping[str, Origin]) -> None:
        """Fill one entry; the state of a new leaf stays as it starts."""
        buffer, path = split_name(entry.name, self.plan.leaves)
        self.names[path] = origins[path].name if path in origins else None
        if path not in origins:
            return
        origin = origins[path]
        names = [
            (f"{self.prefix}{name}.{buffer}", turn) for name, turn in ((origin.name, origin.transpose), *origin.again)
        ]
        there = [pair for pair in names if pair[0] in self.source.tensors]
        self.used.update(name for name, _ in there)
        if not there:
            self.problems.append(f"missing     {names[0][0]}  {list(entry.shape)}")
            return
        for name, turn in there:
            stored = self.source.tensors[name]
            shape = stored.shape[::-1] if turn else stored.shape
            if shape != entry.shape:
                self.problems.append(f"mismatched  {name}: {list(shape)}, the optimizer keeps {list(entry.shape)}")
            elif not fits(stored.dtype, entry.dtype, self.cast):
                self.problems.append(f"mismatched  {name}: {stored.dtype} would be rounded to {entry.dtype}")
        if not self.problems:
            read_piece(self.source, entry.piece, entry.tensor, Origin(*there[0], again=tuple(there[1:])))

    def check(self) -> None:
        """Raise a TreeError that lists missing, unexpected and mismatched state."""
        left = [n for n in self.source.tensors if n.startswith(self.prefix) and n not in self.used]
        self.problems += [f"unexpected  {name}" for name in left if not name.endswith(f".{STEP}")]
        if self.problems:
            head = f"{self.source.name} does not hold the state of this optimizer:"
            remedy = "Give the optimizer that it was saved with, or read the parameters only to start its state anew."
            raise TreeError(lines(head, self.problems, remedy))

    def step(self, names: Sequence[str]) -> int:
        """The largest number of updates of any of these parameters; 0 if the source has none."""
        for name in names:
            stored = self.source.tensors.get(count := f"{self.prefix}{name}.{STEP}")
            if stored is not None and stored.shape in ((), (1,)):
                value = torch.zeros(stored.shape, dtype=torch.float64)
                self.source.read(count, [(Block((0,) * len(stored.shape), stored.shape, 0), value)])
                self.counts[name] = _count(f"{count} of {self.source.name}", value.item())
        return max(self.counts.values(), default=0)

    def late(self, state: TrainState) -> dict[str, int]:
        """The value of ``state.late`` once all entries are filled: leaves that had fewer updates than others."""
        missed = {path: state.step - self.counts.get(name or "", state.step) for path, name in self.names.items()}
        missed |= {path: state.step for path, name in self.names.items() if name is None}
        return {path: late for path, late in missed.items() if late > 0}


def _count(what: str, value: float) -> int:
    if not (value.is_integer() and 0 <= value < 1 << 53):
        raise DamagedError(f"{what} is {value}, which is no number of updates: give step= and optimizer=None")
    return int(value)


def split_name(name: str, leaves: Container[str]) -> tuple[str, str]:
    """The buffer and the leaf of an optimizer's entry, ``opt.exp_avg.blocks.0.weight`` with or without ``opt``.

    >>> split_name("opt.exp_avg.blocks.0.weight", {"blocks.0.weight", "weight"})
    ('exp_avg', 'blocks.0.weight')
    """
    parts = name.removeprefix("opt.").split(".")
    cut = next((at for at in range(1, len(parts)) if ".".join(parts[at:]) in leaves), len(parts))
    return ".".join(parts[:cut]), ".".join(parts[cut:])
