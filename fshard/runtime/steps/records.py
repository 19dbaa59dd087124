"""Records that the stages of a step hand on: each is made by one stage, and not written to after it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from fshard.runtime.comm.facts import Facts
from fshard.runtime.execution import Shards, Shield, Update
from fshard.runtime.execution.actions import NOTHING
from fshard.runtime.execution.executor import OnDemand, Scheduled
from fshard.runtime.steps.consensus import Verdict
from fshard.runtime.steps.programs import Prepared
from fshard.runtime.steps.rank_end import End
from fshard.runtime.steps.readings import RuleNorms
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule

Losses = Sequence[tuple[Tensor, Tensor | float]]
"""The total and the count of each microbatch."""


class StepRequest(NamedTuple):
    """The arguments of one step.

    Attributes:
        batch: this rank's batch.
        shards: the parameters, by group id.
        shield: holds signals back while ranks communicate.
        update: the update that still waits for this step.
        refuse: raises what makes this rank refuse the step before it begins.
        facts: gives what must be equal on all ranks; called after ``refuse``.
        randomness: makes the context in which an attempt draws its random numbers.
        accumulated: what is added to the gradients, and times what, by group id.
        loss_scale: what the loss is multiplied by for the backward.
        seed: in a graph, the gradient of a loss from which its backward starts.
        feedback: what residuals are multiplied by when they are added to gradients.
        normed: whether anybody reads the norm of the gradient; the same on all ranks.
        rules: the number of sets of leaves of which norms are asked for.
        rule_norms: gives these norms when gradients are complete, from those of all groups by their ids.
        stop: whether this rank asks all ranks to stop after this step.
    """

    batch: Any
    shards: Shards
    shield: Shield
    update: Update | None = None
    refuse: Callable[[], object] = bool
    facts: Callable[[], Facts] = Facts
    randomness: Callable[[], AbstractContextManager[None]] = nullcontext
    accumulated: Mapping[int, tuple[Tensor, float]] = NOTHING
    loss_scale: float = 1.0
    seed: Tensor | None = None
    feedback: float = 1.0
    normed: bool = True
    rules: int = 0
    rule_norms: Callable[[Mapping[int, tuple[float, Tensor]]], Sequence[RuleNorms]] = lambda norms: ()
    stop: bool = False


@dataclass(frozen=True)
class Ready:
    """A program that this rank is about to run."""

    request: StepRequest
    prepared: Prepared
    executor: Scheduled | OnDemand
    parts: Sequence[Any]
    facts: Facts


@dataclass(frozen=True)
class Agreed:
    """A program that all ranks are about to run.

    Attributes:
        ready: it, on this rank.
        uneven: how the sizes of batches differ.
        modes: how each rank could run it; see ``Terms.mode``.
    """

    ready: Ready
    uneven: list[str]
    modes: Sequence[int] = (0,)


class PassResult(NamedTuple):
    """The losses of a pass through its microbatches on this rank.

    Attributes:
        losses: the total and the count of each microbatch.
        aux: the auxiliary values of each microbatch; for evaluation, what the function returned.
        weighted: whether the loss is an ``fs.Mean``.
        divided: in a step function, what gradients were divided by before they were summed.
    """

    losses: Losses = ()
    aux: Sequence[Any] = ()
    weighted: bool = False
    divided: float = 1.0


@dataclass(frozen=True)
class ProgramRun:
    """The losses of this rank's program, and how it ended."""

    agreed: Agreed
    measured: PassResult
    end: End


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step on all ranks.

    Attributes:
        verdict: what all ranks learned.
        measured: what this rank's program came to.
        end: how it ended.
        divided: what gradients were divided by.
    """

    verdict: Verdict
    measured: PassResult
    end: End
    divided: float


@dataclass(frozen=True)
class Latest:
    """The latest run on this rank.

    Attributes:
        schedule: its schedule; None if it ran on demand.
        record: the ops that it ran.
        times: when each of them began, and when the last one was over.
        prepared: the program that ran.
        apart: the reason why a step function ran part by part; empty if it did not.
        graph: with ``Policy(graph=)`` how it ran: "replayed", "captured", or "eager" and the reason.
    """

    schedule: Schedule | None = None
    record: Sequence[Op] = ()
    times: Sequence[float] = field(default=(), repr=False)
    prepared: Prepared | None = field(default=None, repr=False)
    apart: str = ""
    graph: str = ""
