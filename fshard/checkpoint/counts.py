"""The number of updates of each leaf of a restored state: moments come with the count that corrects them."""

from collections.abc import Iterator, Mapping, Sequence

from fshard.checkpoint.manifest import Manifest
from fshard.errors import PlanError, lines
from fshard.optim.around import CARRIED, EMA
from fshard.runtime.memory.optimizer_layout import BASIS, RESIDUAL
from fshard.state.entries import LATE
from fshard.state.exchanges import ANCHOR
from fshard.state.pieces import PARAMS, split_name
from fshard.state.train_state import TrainState

UNCOUNTED = {EMA, CARRIED, RESIDUAL, BASIS, ANCHOR}
"""Buffers that no number of updates corrects."""


def late_by_moments(
    state: TrainState, into: TrainState | None, manifest: Manifest, entries: Sequence[str], names: Mapping[str, str]
) -> dict[str, int]:
    """Return how many updates fewer than the state's step each leaf has had; less than nothing where it has had more.

    Args:
        state: the state, whose step is that of ``into`` if that is given.
        into: the state that gives what is not read.
        manifest: what the checkpoint holds.
        entries: the names of all entries of the state.
        names: of the tensors that entries are read from, by the names of the entries.

    Raises:
        PlanError: moments of one leaf come from states in which it has had unlike numbers of updates.
    """
    counts: dict[str, dict[int, str]] = {}
    for path, count, where in _counted(state, into, manifest, entries, names):
        counts.setdefault(path, {})[count] = where
    unlike = {path: each for path, each in counts.items() if len(each) > 1}
    if unlike:
        rows = [f"{path}: {count}, that of {where}" for path, each in unlike.items() for count, where in each.items()]
        remedy = "Let rules= read all optimizer state of a leaf, or none of it: one count corrects its moments."
        raise PlanError(lines("optimizer state of one leaf has had unlike numbers of updates:", rows, remedy))
    late = dict(state.late) | {path: state.step - next(iter(each)) for path, each in counts.items()}
    return {path: missed for path, missed in late.items() if missed}


def _counted(
    state: TrainState, into: TrainState | None, manifest: Manifest, entries: Sequence[str], names: Mapping[str, str]
) -> Iterator[tuple[str, int, str]]:
    """The leaf of each moment, the number of its updates, and where it comes from."""
    saved = {name.removeprefix(PARAMS) for name in manifest.tensors if name.startswith(PARAMS)}
    for name in entries:
        buffer, path = split_name(name, state.plan.leaves)
        if not name.startswith("opt.") or buffer in UNCOUNTED:
            continue
        if name in names:
            missed = manifest.scalars.get(LATE + split_name(names[name], saved)[1])
            missed = missed if isinstance(missed, int) else 0
            yield path, manifest.step - missed, f"{names[name]} in the checkpoint"
        elif into is not None:
            yield path, into.step - into.late.get(path, 0), f"{name} of into="
