"""The first exchange of a step: all ranks are about to run the same, in the same modes, on batches that fit."""

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from fshard.errors import ScheduleError, lines
from fshard.runtime.comm import CALL_SITE_BYTES, Communicator, announce, exchange_bytes, exchange_text
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.facts import Facts, compare_numbers, digest
from fshard.runtime.steps.batch_rows import BatchRows, uneven_rows
from fshard.runtime.steps.consensus import FAILED, LACKING, OK
from fshard.runtime.steps.failures import raise_failure
from fshard.torch_internals import any_autocast, cudnn_benchmark, cudnn_deterministic


@dataclass(frozen=True)
class Intent:
    """The call that a rank is about to run.

    Attributes:
        number: equal on two ranks if it is the same.
        text: says it in lines; asked for only where numbers differ.
    """

    number: int = 0
    text: Callable[[], str] = "gathered on demand".__str__


END = Intent(digest("the end of the step"), "the end of the step".__str__)
"""The intent of a rank whose step function is over, where its parts run one by one."""


class NoScheduleError(ScheduleError):
    """A rank has found no schedule for a call that all ranks can make without one."""


@dataclass(frozen=True)
class Terms:
    """A rank's part in a handshake.

    Attributes:
        call: the name of the call, the same on all ranks.
        intent: this rank's schedule.
        batch: this rank's batch.
        facts: what must be equal on all ranks.
        rows: which sizes of batches must be equal.
        equal_rows: whether batches must be of equal sizes on all ranks.
        mode: how this rank could run it, a number from 0 on that all ranks are told.
    """

    call: str
    intent: Intent = Intent()  # noqa: RUF009 - a frozen value
    batch: Any = None
    facts: Facts = Facts()  # noqa: RUF009 - likewise
    rows: BatchRows = BatchRows()  # noqa: RUF009 - likewise
    equal_rows: bool = False
    mode: int = 0


class Agreement(NamedTuple):
    """The result of a handshake.

    Attributes:
        uneven: how the sizes of batches are unequal, a line a rank; nothing if they are not.
        modes: how each rank could run what all are about to run.
    """

    uneven: list[str]
    modes: Sequence[int]


def agree(comm: Communicator, terms: Terms, failure: BaseException | None = None) -> Agreement:
    """Compare this rank's call, facts, schedule and batch with all others', before anything else is sent.

    Args:
        comm: the control communicator over the whole mesh.
        terms: this rank's.
        failure: what went wrong on this rank before it could take part.

    Raises:
        ReplicationError, ScheduleError, BatchError, PeerError: on every rank alike; or this rank's own failure.
        NoScheduleError: on every rank, if it is the failure of any, and no rank has another one.
    """
    if comm.size == 1:
        if failure is not None:
            raise failure
        return Agreement([], (terms.mode,))
    intent, facts, rows, found = terms.intent, terms.facts, terms.rows, modes()
    mine = [
        -terms.mode if failure is None else _status(failure),
        intent.number,
        facts.number ^ number_of(found),
        *rows.numbers(None if failure else terms.batch),
    ]
    told = announce(comm, terms.call, mine)
    status, schedules, numbers = zip(*[row[:3] for row in told], strict=True)
    if FAILED in status:
        raise_failure(comm, failure, [max(each, OK) for each in status])
    if LACKING in status:
        raise failure or NoScheduleError("another rank has found no schedule")
    if END.number not in schedules:  # a rank at the end of its step has no facts
        compare_numbers(comm, numbers, facts if len(set(numbers)) == 1 else with_modes(facts, found))
    if len(set(schedules)) > 1:
        raise different_schedules(comm, intent)
    return Agreement(_uneven(terms, [row[3:] for row in told]), [-each for each in status])


def _status(failure: BaseException) -> int:
    return LACKING if isinstance(failure, NoScheduleError) else FAILED


def _uneven(terms: Terms, told: Sequence[Sequence[int]]) -> list[str]:
    """Say how the sizes of batches are unequal, unless that is an error."""
    if unlike := terms.rows.unlike(told):
        raise unlike
    uneven = terms.rows.uneven(told)
    if terms.equal_rows and uneven:
        raise uneven_rows(uneven)
    return uneven


def different_schedules(comm: Communicator, intent: Intent) -> ScheduleError:
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
            "which collectives, must be equal, and so must accumulate= and schedule=; with stages also the shapes of "
            "batches: pad them.",
        )
    )


Modes = tuple[object, ...]

MODE_NAMES = (
    "autocast on the CPU",
    "autocast on CUDA",
    "torch.get_default_dtype()",
    "torch.is_grad_enabled()",
    "torch.are_deterministic_algorithms_enabled()",
    "torch.get_float32_matmul_precision()",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.benchmark",
)
"""Names of the ``modes``, in their order."""

NO_AUTOCAST: Modes = (None, None)
"""The dtypes of autocast where there is none."""


def modes() -> Modes:
    """The modes of this thread and process."""
    return (
        *(_autocast() if any_autocast() else NO_AUTOCAST),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        cudnn_deterministic(),
        cudnn_benchmark(),
    )


def _autocast() -> Modes:
    on = torch.is_autocast_enabled
    return tuple([torch.get_autocast_dtype(device) if on(device) else None for device in ("cpu", "cuda")])


@functools.lru_cache(64)
def number_of(found: Modes) -> int:
    """A number that is equal on two ranks if these modes are."""
    return digest(found)


def with_modes(facts: Facts, found: Modes) -> Facts:
    """Facts, with modes of the interpreter among them.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     with_modes(Facts(), modes()).items()[0]["autocast on the CPU"]
    'torch.bfloat16'
    """

    def items() -> list[dict[str, str]]:
        first, *rest = [dict(tier) for tier in facts.items()] or [{}]
        return [first | dict(zip(MODE_NAMES, map(str, found), strict=True)), *rest]

    return replace(facts, number=facts.number ^ number_of(found), items=items)
