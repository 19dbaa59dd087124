"""The outcome of a step function on one rank, before the others learn of it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fshard.parts.replay import Replay
from fshard.parts.returned_values import returned_values
from fshard.parts.step_arguments import FunctionResult
from fshard.runtime.engine.plain_values import PlainTold
from fshard.runtime.steps.consensus import FAILED, OK
from fshard.runtime.steps.rank_end import End


class Attempt(NamedTuple):
    """The outcome of a step function on this rank.

    Attributes:
        end: how it ended.
        result: what it returned.
        sums: its numbers that are summed over ranks.
        copies: marks of the copies that it holds.
        plain: the plain values that it returned.
        floats: the mean over ranks of each float among these.
        joint: the sums over ranks, once all have met.
        marks: the marks of copies, by rank, likewise.
    """

    end: End
    result: FunctionResult | None
    sums: Sequence[float] = ()
    copies: Sequence[float] = ()
    plain: PlainTold = PlainTold()
    floats: Sequence[float] = ()
    joint: Sequence[float] = ()
    marks: Sequence[Sequence[float]] = ()


def tallied(replay: Replay, result: FunctionResult | None, end: End) -> Attempt:
    """Return what this rank brings to the consensus."""
    if result is None or end.status != OK:
        return Attempt(end, None)
    try:
        updates = [each for final in result.finals for each in final.updates]
        return Attempt(end, result, *replay.tally(updates, returned_values(result.metrics)))
    except torch.AcceleratorError:  # the device is lost, and those of other ranks wait for it
        raise
    except Exception as error:  # a device reports late what went wrong there
        return Attempt(End(FAILED, error), None)
