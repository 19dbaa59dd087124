"""Actions of a pipeline: which stage computes what of which microbatch, and what must be done before it.

====  ==================================================================  =======================================
kind  meaning                                                             waits for
====  ==================================================================  =======================================
F     the forward of a stage                                              the forward of the stage before
B     its whole backward                                                  its forward, the backward of the next stage
I     the part of its backward that makes the gradients of its inputs     the same
W     the part of its backward that makes the gradients of its weights    its own I
====  ==================================================================  =======================================

A backward is one B, or one I and later one W. The names are those of PyTorch's ``torch.distributed.pipelining``.
"""

import re
from dataclasses import dataclass

from fshard.pipeline import pipeline_refusals

KINDS = ("F", "B", "I", "W")
"""The kinds of actions."""

BACKWARDS = frozenset(("B", "I"))
"""The kinds that make the gradients of a stage's inputs."""

Result = tuple[str, int, int]
"""The result of an action: forward (F), gradients of inputs (I) or of weights (W), and its stage and microbatch."""

TEXT = re.compile(r"([0-9]{1,9})([A-Z_]+)([0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """A computation of one stage for one microbatch.

    Args:
        stage: the number of the stage, from 0.
        kind: ``"F"``, ``"B"``, ``"I"`` or ``"W"``.
        microbatch: the number of the microbatch, from 0.

    Raises:
        PlanError: the kind is unknown, or a number is no int of at least 0.

    >>> print(Action(2, "F", 3))
    2F3
    """

    stage: int
    kind: str
    microbatch: int

    def __post_init__(self) -> None:
        numbers = (self.stage, self.microbatch)
        if self.kind not in KINDS or any([type(number) is not int or number < 0 for number in numbers]):
            raise pipeline_refusals.bad_action(self.stage, self.kind, self.microbatch, KINDS)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def read_action(text: str) -> Action:
    """Read the text of an action.

    Args:
        text: stage, kind and microbatch, such as ``2F3``.

    Returns:
        The action with this text.

    Raises:
        ValueError: it is no such text.

    >>> read_action("1W0")
    Action(stage=1, kind='W', microbatch=0)
    """
    match = TEXT.fullmatch(text)
    if match is None or match[2] not in KINDS:
        raise ValueError(f"{text[:40]!r} is no action: write stage, kind ({', '.join(KINDS)}) and microbatch, as 2F3")
    return Action(int(match[1]), match[2], int(match[3]))


def results(action: Action) -> tuple[Result, ...]:
    """List the results of an action.

    Args:
        action: any action; a whole backward makes the gradients of inputs and those of weights.

    Returns:
        One or two results.

    >>> results(Action(1, "B", 0))
    (('I', 1, 0), ('W', 1, 0))
    """
    kinds = ("I", "W") if action.kind == "B" else (action.kind,)
    return tuple([(kind, action.stage, action.microbatch) for kind in kinds])


def needs(action: Action, stages: int) -> tuple[Result, ...]:
    """List the results that an action waits for.

    Args:
        action: any action.
        stages: the number of stages of its pipeline.

    Returns:
        The results, those of its own stage first.

    >>> needs(Action(1, "I", 0), 3)
    (('F', 1, 0), ('I', 2, 0))
    """
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if action.kind == "W":
        return (("I", stage, microbatch),)
    after: tuple[Result, ...] = (("I", stage + 1, microbatch),) if stage + 1 < stages else ()
    return ("F", stage, microbatch), *after
