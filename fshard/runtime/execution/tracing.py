"""The executor of a run on fake tensors, and the program that a run has shown."""

import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fshard.runtime.engine.hosted_activations import HostedActivations
from fshard.runtime.execution.executor import Again, OnDemand
from fshard.schedule.activation_moves import moves_of
from fshard.schedule.ops import ROOT, Call, Op, Program


def tell_untrained(leaves: list[Tensor]) -> None:
    """Say that a loss depends on tensors from outside that the step does not train: most often by mistake."""
    if leaves:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves[:3]) + (", ..." if len(leaves) > 3 else "")
        kinds = " and ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        warnings.warn(
            f"the loss depends on {len(leaves)} leaves ({kinds}) that the step neither trains nor updates, of shape "
            f"{shapes}. A closure or a hook that names a module, such as lambda x: x * self.scale, reads the module "
            f"that was split: use a method, or the module that a hook is given. Call another model, such as a teacher, "
            f"under torch.no_grad()",
            stacklevel=2,
        )


def tell_dropping() -> None:
    """Say that an evaluation runs dropout: ``module.eval()`` after the split, which users know, changes nothing."""
    warnings.warn(
        "an evaluation draws masks, as dropout in training does. A model has the modes of its module at fs.split, and "
        "module.eval() later does not reach it: call model.apply(..., training=False)",
        stacklevel=2,
    )


Key = tuple[str, str, int]
"""A compute op: its kind, unit and call."""


class TracedMoves:
    """The moves of activations of a program that is known, on fake tensors.

    Args:
        activations: moves them.
    """

    def __init__(self, program: Program, activations: HostedActivations) -> None:
        self.verbs = activations.verbs()
        places = [(op.kind, op.target, op.index) for op in program.computes]
        before, after = moves_of(program)
        self.first = {places[at]: ops for at, ops in before.items()}
        self.then = {places[at]: ops for at, ops in after.items()}

    def before(self, key: Key) -> None:
        """A compute op is next."""
        self._run(self.first.get(key, ()))

    def after(self, key: Key) -> None:
        """A compute op is over."""
        self._run(self.then.get(key, ()))

    def _run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            self.verbs[op.kind]((op.target, op.index))


class Tracing:
    """Only writes down what the program does: the executor of a run on fake tensors.

    Args:
        turn: called whenever a compute op is over.
        moves: the moves of activations, of a program that was traced before.

    Attributes:
        scaled: the tables whose gradients are divided by counts of the batch.
    """

    busy = False

    def __init__(self, turn: Callable[[], None], moves: TracedMoves | None = None) -> None:
        self.turn, self.moves = turn, moves
        self.latest: Key | None = None  # the compute op that is not settled yet
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        self.glue: dict[int, None] = {}
        self.scaled: dict[str, None] = {}
        self.again = Again()

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Note the call."""
        self.settle()
        self.turn()
        if self.moves is not None:
            self.latest = kind, unit, index
            self.moves.before(self.latest)  # no other op stands between these and the compute
        self.again.reach(kind, unit)
        if unit != ROOT:
            (self.forward if kind == "forward" else self.backward).append(Call(unit, index))

    def touch(self, group: int) -> None:
        """Note that code outside of units reads this group."""
        self.glue[group] = None

    def settle(self) -> None:
        """Move what stands after the latest compute op."""
        if self.moves is not None and self.latest is not None:
            self.moves.after(self.latest)
            self.latest = None

    def readable(self, groups: Sequence[int]) -> bool:
        """Fake leaves are always there."""
        self.again.note(groups)
        return True

    def outside(self, group: int) -> bool:
        """It is noted, not judged."""
        self.glue[group] = None
        return True


def program_of(seen: Tracing | OnDemand, reads: Mapping[str, Sequence[int]]) -> Program:
    """The program that an executor saw: its calls, what each unit reads, and what the code between units reads."""
    used = {call.unit for call in seen.forward}
    again = seen.again.reads
    table = {
        unit: tuple(dict.fromkeys((*groups, *again.get(unit, ())))) for unit, groups in reads.items() if unit in used
    }
    glue = {*seen.glue, *again.get(ROOT, ())}
    return Program(tuple(seen.forward), tuple(seen.backward), {**table, ROOT: tuple(sorted(glue))})
