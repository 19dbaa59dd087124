"""Failures of steps: how a rank's failure becomes that of all ranks, and what leaves the mesh broken."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fshard.arguments import raised
from fshard.errors import BatchError, LossError, PeerError, ReplicationError, ScheduleError, TransformError, lines
from fshard.runtime.comm import CALL_SITE_BYTES, Communicator, exchange_text, raise_failures
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.communicator import Transport
from fshard.runtime.execution.executor import diverged
from fshard.runtime.steps.consensus import CUT, FAILED
from fshard.runtime.steps.step_refusals import step_transformed
from fshard.torch_internals import graph_break, peek_interpreter_stack

FAILURE, BEHIND = "!", "!!"
"""Begin the text of a rank that failed, where ranks exchange requests: of itself, or because it was cut off."""


def raise_failure(comm: Communicator, failure: BaseException | None, status: Sequence[int], own: int = FAILED) -> None:
    """Raise what went wrong: this rank's own failure, or what the first rank that failed says of its own. Collective.

    A rank that was cut off raises its own failure only if no other rank's is behind it.
    """
    failed = [rank for rank, code in enumerate(status) if code == FAILED]
    causes = failed or [rank for rank, code in enumerate(status) if code == CUT]
    head = f"{len(causes)} of {len(status)} ranks failed, so no rank made this step:"
    remedy = "The state is as it was before the call and can be used."
    raise_failures(comm, failure, head, remedy, causes, cut_off=bool(failed) and own == CUT)


def request(comm: Communicator, text: str) -> None:
    """Agree on what all ranks do next, where no schedule says it. Collective.

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
        raise _failed_peers({rank: texts[rank][1:] for rank in behind or failed})
    if len(set(texts)) > 1:
        places = exchange_text(comm, call_site(), CALL_SITE_BYTES)
        raise diverged([f"{text} ({place})" for text, place in zip(texts, places, strict=True)])


def report(comm: Communicator, failure: BaseException, status: int) -> None:
    """Answer the other ranks' next request with a failure of this rank's program. Collective.

    Raises:
        PeerError: this rank was cut off, and another rank's failure is behind it.
    """
    request(comm, (BEHIND if status == CUT else FAILURE) + raised(failure))


def _failed_peers(texts: Mapping[int, str]) -> PeerError:
    """The error of a rank whose peers failed."""
    rows = [f"rank {rank}: {text.removeprefix(FAILURE)}" for rank, text in texts.items()]
    return PeerError(lines("a rank failed, so no rank made this step:", rows, "The state can still be used."))


def refuse_transforms(what: str) -> None:
    """Steps work on memory that transforms know nothing of.

    Raises:
        TransformError: a transform of ``torch.func`` or ``torch.compile`` is under way, or it is a train step in
            inference mode.
    """
    refuse_compiling(what)
    if peek_interpreter_stack() is not None:
        raise step_transformed(what)
    if "train" in what and torch.is_inference_mode_enabled():
        raise TransformError(
            f"{what} was called under torch.inference_mode(), where autograd records nothing: call it outside of that, "
            f"or evaluate with fs.make_eval_step, which works there"
        )


_COMPILES = {
    "a train step": "fs.make_train_step",
    "a train step of parts": "fs.value_and_grad",
    "a gradient": "fs.value_and_grad",
    "an eval step": "fs.make_eval_step",
}
"""What has an option to compile the units of a call."""


def refuse_compiling(what: str) -> None:
    """No compiled graph can hold a schedule of communication.

    Raises:
        TransformError: ``torch.compile`` is under way.
    """
    if torch.compiler.is_dynamo_compiling():
        text = _compiled(what)
        graph_break(text)  # what Dynamo traces raises nothing: the code after a break runs
        raise TransformError(text)


def _compiled(what: str) -> str:
    remedy = "call it as it is"
    if what in _COMPILES:
        remedy = (
            f"give {_COMPILES[what]}(..., compile='inductor'), which compiles each unit and leaves communication as it "
            f"is, and call what it returns as it is"
        )
    return f"{what} was called inside of torch.compile, which cannot hold a schedule of communication: {remedy}"


def starved(error: BaseException) -> bool:
    """Tell whether memory ran out. PyTorch's allocator of the host says so in a plain ``RuntimeError``."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


@contextmanager
def together(transport: Transport) -> Iterator[None]:
    """Break the mesh by what leaves this otherwise than all ranks together.

    Its peers must not wait for it.
    """
    try:
        yield
    except (PeerError, ScheduleError, BatchError, LossError, ReplicationError):
        raise
    except BaseException as error:
        left = transport.abort_all(raised(error))
        if left and left not in str(error):
            error.add_note(left)
        raise


def left_in_backward() -> ScheduleError:
    """A program left its schedule after a part of the step's updates was made."""
    return ScheduleError(
        "the program left its schedule during a step with update='in_backward', after parameters were updated, so the "
        "step cannot be run again: restore the state from a checkpoint, and use update='deferred' for programs whose "
        "units change from step to step"
    )
