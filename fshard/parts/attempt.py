"""The outcome of a step function: what one rank reads of it, and what all of them learn."""

from collections.abc import Sequence
from typing import NamedTuple

from fshard.parts.assemble import Assembled
from fshard.parts.replay import Replay
from fshard.parts.returned_values import plain_columns, returned_values
from fshard.parts.step_arguments import FunctionResult
from fshard.runtime.engine.plain_values import PlainTold
from fshard.runtime.steps.consensus import Columns
from fshard.runtime.steps.rank_end import End


class StepTally(NamedTuple):
    """The numbers that one rank brings to the end of a step function.

    Attributes:
        sums: those that are summed over ranks, in the order of ``Replay.tally``.
        copies: marks of the copies that it holds.
        plain: the plain values that its function returned.
    """

    sums: Sequence[float] = ()
    copies: Sequence[float] = ()
    plain: PlainTold = PlainTold()


class Attempt(NamedTuple):
    """The outcome of a step function.

    Attributes:
        end: how this rank's part ended.
        result: what it returned on this rank.
        floats: the mean over ranks of each float among the plain values that it returned.
        joint: the sums over ranks.
        marks: the marks of copies, by rank.
    """

    end: End
    result: FunctionResult | None
    floats: Sequence[float] = ()
    joint: Sequence[float] = ()
    marks: Sequence[Sequence[float]] = ()


def tallied(replay: Replay, result: FunctionResult) -> StepTally:
    """Read what this rank brings to the consensus."""
    updates = [each for final in result.finals for each in final.updates]
    return StepTally(*replay.tally(updates, returned_values(result.metrics)))


def columns(step: Assembled, tally: StepTally | None, busy: float) -> Columns:
    """The numbers of a rank by name."""
    mine = tally or StepTally()
    return {
        "sums": (mine.sums, step.width),
        "copies": (mine.copies, len(step.copied)),
        **plain_columns(mine.plain),
        "busy": ([busy], 1),
    }
