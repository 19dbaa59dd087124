"""One attempt at a step: from the agreement of all ranks to their vote, whatever happens in between on any of them.

A rank whose program fails keeps issuing the collectives that its schedule still holds, with whatever data it has, and
then votes ``FAILED``: no rank hangs, and every rank learns at the same point that this step did not happen.
"""

import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fshard.arguments import raised
from fshard.errors import (
    BatchError,
    CommError,
    LossError,
    PeerError,
    ReplicationError,
    ScheduleError,
    TransformError,
    lines,
    step_transformed,
)
from fshard.runtime.comm import CALL_SITE_BYTES, Communicator, announce, exchange_bytes, exchange_text, raise_failures
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.facts import Facts, digest, settle
from fshard.runtime.engine.batch import leading_dims
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.execution.executor import OnDemand, Scheduled, diverged
from fshard.runtime.steps.commit import CUT, FAILED, OK, RETRY, Verdict

FAILURE, BEHIND = "!", "!!"
"""Begin the text of a rank that failed, where ranks exchange requests: of itself, or because it was cut off."""


@dataclass
class Outcome:
    """What came of an attempt.

    Attributes:
        status: how this rank's own part went.
        losses: the total and the count of each microbatch.
        weighted: whether the loss is an ``fs.Mean``.
        verdict: what all ranks learned; None until they voted.
        failure: what this rank's program raised.
        left: where the program left its schedule, if it did.
        uneven: the leading dim of each rank's batch, if they differ.
        divided: what its gradients were divided by.
        aux: the auxiliary values of each microbatch; for evaluation, what the function returned.
    """

    status: int = OK
    losses: list[tuple[Tensor, Tensor | float]] = field(default_factory=list)
    weighted: bool = False
    verdict: Verdict | None = None
    failure: BaseException | None = None
    left: str = ""
    uneven: list[int] = field(default_factory=list)
    divided: float = 1.0
    aux: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Intent:
    """What a rank is about to run.

    Attributes:
        number: equal on two ranks if it is the same.
        text: says it in lines; asked for only where numbers differ.
    """

    number: int = 0
    text: Callable[[], str] = "gathered on demand".__str__


def agree(
    comm: Communicator,
    call: str,
    intent: Intent,
    batch: Any,
    equal_rows: bool,
    failure: BaseException | None,
    facts: Facts = Facts(),  # noqa: B008 - a frozen value
) -> list[int]:
    """Compare this rank's call, facts, schedule and batch with all others', before anything else is sent.

    Args:
        communicator: the control communicator over the whole mesh.
        call: what is called, the same on all ranks.
        intent: this rank's schedule.
        batch: this rank's batch.
        equal_rows: whether leading dims must be equal on all ranks.
        failure: what went wrong on this rank before it could take part.
        facts: what must be equal on all ranks.

    Returns:
        The leading dim of each rank's batch if they are unequal, else nothing.

    Raises:
        ReplicationError, ScheduleError, BatchError, PeerError: on every rank alike; or this rank's own failure.
    """
    if comm.size == 1:
        if failure is not None:
            raise failure
        return []
    dims = () if failure else leading_dims(batch)
    mine = [FAILED if failure else OK, intent.number, digest(dims), dims[0] if dims else -1, facts.number]
    status, schedules, shapes, firsts, numbers = zip(*announce(comm, call, mine), strict=True)
    if any(status):
        raise_failure(comm, failure, status)
    settle(comm, numbers, facts)
    if len(set(schedules)) > 1:
        raise _different(comm, intent)
    uneven = list(firsts) if len(set(shapes)) > 1 else []
    if equal_rows and uneven:
        raise uneven_rows(uneven)
    return uneven


def _different(comm: Communicator, intent: Intent) -> ScheduleError:
    """The error of ranks with different schedules: where each is called, and where it first differs from rank 0's."""
    places = exchange_text(comm, call_site(), CALL_SITE_BYTES)
    said = exchange_bytes(comm, zlib.compress(intent.text().encode()))
    texts = [zlib.decompress(text).decode().splitlines() for text in said]
    kinds = []
    for rank, (text, place) in enumerate(zip(texts, places, strict=True)):
        pairs = zip_longest(texts[0], text, fillvalue="nothing")
        first = next((f": '{b.strip()}' where rank 0 has '{a.strip()}'" for a, b in pairs if a != b), "")
        kinds.append(f"rank {rank}: schedule of {len(text)} lines, {place}{first}")
    return ScheduleError(
        lines(
            "ranks are about to run different schedules:",
            kinds,
            "The program must be the same on all ranks; Python values in the batch that decide which units run, or "
            "which collectives, must be equal, and so must accumulate= and schedule=.",
        )
    )


def uneven_rows(dims: list[int]) -> BatchError:
    """The error of a mean loss over batches of different sizes."""
    rows = [f"rank {rank}: {dim if dim >= 0 else 'no'} rows" for rank, dim in enumerate(dims)]
    if len(set(dims)) == 1:
        rows = [f"the batch's first tensor has {dims[0]} rows on every rank, but others differ"]
    return BatchError(
        lines(
            "the leading dims of the batch differ between ranks, and a plain mean over them would be wrong:",
            rows,
            "Give every rank as many rows, or return fs.Mean(losses.sum(), count) from the loss function.",
        )
    )


def raise_failure(comm: Communicator, failure: BaseException | None, status: Sequence[int], own: int = FAILED) -> None:
    """Raise what went wrong: this rank's own failure, or what the first rank that failed says of its own.

    A rank that was cut off raises its own failure only if no other rank's is behind it.
    """
    failed = [rank for rank, code in enumerate(status) if code == FAILED]
    causes = failed or [rank for rank, code in enumerate(status) if code == CUT]
    head = f"{len(causes)} of {len(status)} ranks failed, so no rank made this step:"
    remedy = "The state is as it was before the call and can be used."
    raise_failures(comm, failure, head, remedy, causes, cut_off=bool(failed) and own == CUT)


def raise_outcome(comm: Communicator, outcome: Outcome, rank: int) -> Verdict:
    """What all ranks voted, if all of them made it.

    Raises:
        PeerError: another rank failed; or this rank's own failure.
    """
    verdict = outcome.verdict
    assert verdict is not None
    if verdict.worst == FAILED:
        raise_failure(comm, outcome.failure, verdict.status, verdict.status[rank])
    return verdict


def refuse_transforms(what: str) -> None:
    """Steps work on memory that transforms know nothing of.

    Raises:
        TransformError: a transform of ``torch.func`` is under way, or it is a train step in inference mode.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise step_transformed(what)
    if "train" in what and torch.is_inference_mode_enabled():
        raise TransformError(
            f"{what} was called under torch.inference_mode(), where autograd records nothing: call it outside of that, "
            f"or evaluate with fs.make_eval_step, which works there"
        )


def request(comm: Communicator, text: str) -> None:
    """Agree on what all ranks do next, where no schedule says it.

    Raises:
        ScheduleError: ranks ask for different things.
        PeerError: a rank failed, and this one did not.
    """
    texts = exchange_text(comm, text)
    failed = [rank for rank, theirs in enumerate(texts) if theirs.startswith(FAILURE)]
    behind = [rank for rank in failed if not texts[rank].startswith(BEHIND)]
    if failed:
        if text.startswith(FAILURE) and not (behind and text.startswith(BEHIND)):
            return
        failed = behind or failed
        raise failed_peers({rank: texts[rank][1:] for rank in failed})
    if len(set(texts)) > 1:
        places = exchange_text(comm, call_site(), CALL_SITE_BYTES)
        raise diverged([f"{text} ({place})" for text, place in zip(texts, places, strict=True)])


def failed_peers(texts: Mapping[int, str]) -> PeerError:
    """The error of a rank whose peers failed."""
    rows = [f"rank {rank}: {text.removeprefix(FAILURE)}" for rank, text in texts.items()]
    return PeerError(lines("a rank failed, so no rank made this step:", rows, "The state can still be used."))


def guarded(body: Callable[[], None], outcome: Outcome, executor: Scheduled | OnDemand) -> int:
    """Run a program; what it raises becomes part of the outcome. What all ranks raise together is raised at once."""
    try:
        body()
    except CommError as error:
        if executor.lost:
            raise
        outcome.failure = error
        return CUT
    except Mispredicted as reason:
        outcome.left = str(reason)
        return RETRY
    except BaseException as error:  # Ctrl-C too: other ranks wait for this one's collectives
        if executor.lost:
            raise
        outcome.failure = error
        if starved(error):
            traceback.clear_frames(error.__traceback__)  # they hold the activations
        return FAILED
    return OK


def starved(error: BaseException) -> bool:
    """Whether memory ran out. PyTorch's allocator of the host says so in a plain ``RuntimeError``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


@contextmanager
def together(comms: Communicators) -> Iterator[None]:
    """What leaves this otherwise than all ranks together leaves the mesh broken: its peers must not wait for it."""
    try:
        yield
    except (PeerError, ScheduleError, BatchError, LossError, ReplicationError):
        raise
    except BaseException as error:
        comms.transport.abort_all(raised(error))
        raise


def drained(outcome: Outcome, executor: Scheduled) -> None:
    """Run what is left of a schedule: for the update, or, after a failure, for the other ranks alone.

    Raises:
        CommError: a collective failed; or an op of this rank, twice, so that the others cannot go on.
    """
    if outcome.status == OK:
        try:
            executor.finish()
        except (CommError, PeerError, ScheduleError, LossError):
            raise
        except Exception as error:
            outcome.status, outcome.failure = FAILED, error
            traceback.clear_frames(error.__traceback__)
    executor.drain()
