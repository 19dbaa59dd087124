"""Local work with one outcome for all ranks: every rank gets all results, or all ranks raise."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fshard.arguments import raised
from fshard.errors import (
    CheckpointError,
    CommError,
    DamagedError,
    DonatedError,
    PeerError,
    PlanError,
    StateError,
    TreeError,
    lines,
    no_processes,
)
from fshard.runtime.comm.communicator import Communicator, SingleRank
from fshard.runtime.comm.exchange import exchange_bytes
from fshard.sharding.mesh import Mesh

T = TypeVar("T")

TEXT = 1 << 14
"""Bytes of a rank's failure that a PeerError quotes."""

KINDS = {
    kind.__name__: kind for kind in (CheckpointError, DamagedError, DonatedError, PlanError, StateError, TreeError)
}
"""Errors that keep their class on other ranks. Other classes become a CheckpointError that names them."""


def mesh_communicator(mesh: Mesh, role: str = "control") -> Communicator:
    """The communicator of a role over the whole mesh. Collective at its first call.

    Raises:
        PlanError: the mesh is abstract.
    """
    if mesh.size == 1:
        return SingleRank()
    if mesh.transport is None:
        raise no_processes()
    comm: Communicator = mesh.transport.communicator(role, mesh.axis_names)
    return comm


def all_ranks_or_raise(comm: Communicator, body: Callable[[], T]) -> list[T]:
    """Run a local function on every rank and return the results of all, or raise one error on all. Collective.

    Args:
        comm: over all ranks.
        body: a function that does not communicate and returns a value of JSON.

    Raises:
        CheckpointError, DamagedError, DonatedError, PlanError, StateError, TreeError: what any rank raised, equal on
            all ranks.
        BaseException: an interrupt, on its own rank; the other ranks get a CheckpointError.
    """
    value, failure = _attempt(body)
    found: list[T] = _results(comm, value, failure)
    return found


def each_rank_or_raise(comm: Communicator, body: Callable[[], T]) -> T:
    """Like ``all_ranks_or_raise``, but return only this rank's result, of any type. Collective."""
    value, failure = _attempt(body)
    _results(comm, None, failure)
    own: T = value
    return own


def first_rank_or_raise(comm: Communicator, rank: int, body: Callable[[], T]) -> T:
    """Run a local function on rank 0 and return its result on all. Collective; raises like ``all_ranks_or_raise``."""
    found: list[T | None] = all_ranks_or_raise(comm, body if rank == 0 else lambda: None)
    return found[0]  # type: ignore[return-value]  # of rank 0


def raise_failures(
    comm: Communicator,
    failure: BaseException | None,
    head: str,
    remedy: str,
    causes: Sequence[int] | None = None,
    cut_off: bool = False,
) -> None:
    """Raise this rank's failure, or a PeerError that quotes the failures of other ranks. Collective.

    Args:
        comm: over all ranks.
        failure: the exception of this rank, if it failed.
        head: the first line of the PeerError.
        remedy: its last line.
        causes: the ranks to quote; by default all that failed.
        cut_off: whether this rank failed only because another rank did, and raises the PeerError too.

    Raises:
        PeerError: another rank failed, and this one did not or was cut off.
        BaseException: the failure of this rank.
    """
    texts = tell_failure(comm, failure)
    if failure is not None and not cut_off:
        raise failure
    ranks = [rank for rank, text in enumerate(texts) if text] if causes is None else causes
    if ranks:
        raise PeerError(lines(head, [f"rank {rank}: {texts[rank]}" for rank in ranks], remedy)) from failure


def tell_failure(comm: Communicator, failure: BaseException | None) -> list[str]:
    """Return what each rank says of its failure; empty for those without one. Collective."""
    mine = "" if failure is None else raised(failure)
    told = exchange_bytes(comm, mine.encode(errors="backslashreplace")[:TEXT])
    return [text.decode(errors="replace") for text in told]


def _attempt(body: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """The result of a function, or its exception, even Ctrl-C: the other ranks wait for this rank's report."""
    try:
        return body(), None
    except BaseException as error:
        return None, error


def _results(comm: Communicator, value: Any, failure: BaseException | None) -> list[Any]:
    """The results of all ranks; raises if any failed."""
    if comm.size == 1:
        if failure is not None:
            raise failure
        return [value]
    report = {"value": value} if failure is None else {"kind": type(failure).__name__, "text": str(failure)}
    reports = [_read(text) for text in exchange_bytes(comm, json.dumps(report).encode())]
    failed = {rank: report for rank, report in enumerate(reports) if "kind" in report}
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    if failed:
        raise _common_error(failed, len(reports)) from failure
    return [report["value"] for report in reports]


def _read(text: bytes) -> dict[str, Any]:
    """A rank's report, decoded."""
    try:
        report = json.loads(text)
    except ValueError:  # also of bytes that are not UTF-8
        report = None
    if not isinstance(report, dict) or not ("value" in report or {"kind", "text"} <= report.keys()):
        raise CommError(
            f"a rank sent {text[:40]!r}, which is no report of this call: all ranks must make the same calls in one "
            f"order"
        )
    return report


def _common_error(failed: dict[int, dict[str, str]], ranks: int) -> Exception:
    """One error for all failures, the same on all ranks."""
    kinds = {report["kind"] for report in failed.values()}
    kind = KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    texts = {rank: r["text"] if r["kind"] in KINDS else f"{r['kind']}: {r['text']}" for rank, r in failed.items()}
    if len(set(texts.values())) == 1:
        where = "" if len(failed) in (1, ranks) else f" (on ranks {list(failed)})"
        return kind(texts.popitem()[1] + where)
    rows = [f"rank {rank}: {text}" for rank, text in texts.items()]
    return kind(lines(f"{len(failed)} of {ranks} ranks failed:", rows, "What is on disk is as it was."))
