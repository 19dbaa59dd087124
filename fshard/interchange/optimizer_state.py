"""Optimizer state by name: which of a source's tensors becomes which buffer of which leaf.

``torch.optim`` names state by parameter and buffer, ``state.blocks.0.weight.exp_avg``, once the integers of its state
dicts are replaced by names; fshard names it by buffer and leaf. The buffers have the same names.
"""

import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fshard.errors import CheckpointWarning, DamagedError, TreeError, lines
from fshard.interchange.source import Origin, TensorSource, load, misfit, read_piece
from fshard.optim.base import Optimizer
from fshard.runtime.memory.optimizer_layout import BASIS, RESIDUAL
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.pieces import Entry, split_name
from fshard.state.train_state import TrainState

STEP = "step"
"""torch's name of the number of updates of a parameter."""


def load_with_optimizer(
    plan: Plan,
    opt: Optimizer | None,
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
    refuse_stages("reading an optimizer's state", plan)
    reader = OptimizerReader(plan, optim, cast)
    if step is None:
        step = reader.step(list(params.tensors))
    state = load(plan, opt, params, step=step, cast=cast, fill=reader.fill, **options)
    reader.check()
    return replace(state, late=reader.late(state))


class OptimizerReader:
    """Fills the entries of an optimizer's state from a source, named ``state.{parameter}.{buffer}``.

    It records what does not fit; floating-point tensors may be rounded with ``cast``.
    """

    def __init__(self, plan: Plan, source: TensorSource, cast: bool) -> None:
        self.plan, self.source, self.cast = plan, source, cast
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}  # of updates, by the source's names of parameters
        self.names: dict[str, str | None] = {}  # of leaves with state; None for a new leaf

    def fill(self, entry: Entry, origins: Mapping[str, Origin]) -> None:
        """Fill one entry; the state of a new leaf stays as it starts."""
        buffer, path = split_name(entry.name, self.plan.leaves)
        names = [(f"state.{name}.{buffer}", transpose) for name, transpose in origins[path]]
        self.names[path] = origins[path][0][0] if names else None
        found = [(name, transpose) for name, transpose in names if name in self.source.tensors]
        self.used.update(name for name, _ in found)
        if names and not found:
            self.problems.append(f"missing     {names[0][0]}  {list(entry.shape)}")
        for name, transpose in found:
            meta = self.source.tensors[name]
            if problem := misfit(meta, entry.shape, entry.dtype, transpose, self.cast, "the optimizer keeps"):
                self.problems.append(f"mismatched  {name}: {problem}")
        if found and not self.problems:
            read_piece(self.source, entry.piece, entry.tensor, found)

    def check(self) -> None:
        """Raise a TreeError that lists missing, unexpected and mismatched state."""
        rest = [name for name in self.source.tensors if name.startswith("state.") and name not in self.used]
        self.problems += [f"unexpected  {name}" for name in rest if not name.endswith(f".{STEP}")]
        if self.problems:
            head = f"{self.source.name} does not hold the state of this optimizer:"
            remedy = "Give the optimizer that it was saved with, or read the parameters only to start its state anew."
            raise TreeError(lines(head, self.problems, remedy))

    def step(self, names: Sequence[str]) -> int:
        """The largest number of updates of any of these parameters; 0 if the source has none."""
        for name in names:
            meta = self.source.tensors.get(count := f"state.{name}.{STEP}")
            if meta is not None and meta.shape in ((), (1,)):
                value = torch.zeros(meta.shape, dtype=torch.float64, device="cpu")
                self.source.read(count, [((0,) * len(meta.shape), value)])
                updates = float(value)
                if not (updates.is_integer() and 0 <= updates < 1 << 53):
                    raise DamagedError(
                        f"{count} of {self.source.name} is {updates}, which is not a number of updates: give step= and "
                        f"optimizer=None"
                    )
                self.counts[name] = int(updates)
        return max(self.counts.values(), default=0)

    def late(self, state: TrainState) -> dict[str, int]:
        """The value of ``state.late`` once all entries are filled: leaves that had fewer updates than others."""
        missed = {path: state.step - self.counts.get(name or "", state.step) for path, name in self.names.items()}
        missed |= {path: state.step for path, name in self.names.items() if name is None}
        return {path: late for path, late in missed.items() if late > 0}


def left_out(call: str, names: Sequence[str], leaves: Container[str]) -> frozenset[str]:
    """The entries that no optimizer of torch has, which a warning names: what sums over replicas keep for the next.

    Args:
        call: what leaves them out.
        names: of the entries that could be written.
        leaves: the paths of leaves.
    """
    found = [name for name in names if name.startswith("opt.") and split_name(name, leaves)[0] in (RESIDUAL, BASIS)]
    if found:
        warnings.warn(
            f"{call} leaves out {found[0]}{f' and {len(found) - 1} more' * (len(found) > 1)}: what sums over replicas "
            f"keep for the next ones (fs.Wire(feedback=)), which no optimizer of torch has. A run that goes on from "
            f"there begins without it; a checkpoint of fs.Checkpointer has it",
            CheckpointWarning,
            stacklevel=4,
        )
    return frozenset(found)
