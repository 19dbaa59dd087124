"""How the ranks of a job agree on a checkpoint: whatever goes wrong on one of them is the same error on all."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fshard.errors import (
    CheckpointError,
    CommError,
    DamagedError,
    DonatedError,
    PlanError,
    TreeError,
    lines,
    no_processes,
)
from fshard.runtime.comm import Alone, Lane, exchange_bytes
from fshard.sharding.mesh import Mesh

T = TypeVar("T")

KINDS = {kind.__name__: kind for kind in (CheckpointError, DamagedError, DonatedError, PlanError, TreeError)}
"""Errors that travel as what they are."""


@dataclass(frozen=True)
class Meeting:
    """The ranks of a mesh, as one of them meets the others.

    Attributes:
        lane: over all axes.
        rank: this one.
    """

    lane: Lane
    rank: int

    def together(self, body: Callable[[], T]) -> list[T]:
        """Run a function that talks to nobody on every rank, and tell all ranks what each one's returned.

        Args:
            body: returns a value of JSON.

        Raises:
            CheckpointError, DamagedError, TreeError: what any rank raised, alike on all of them.
            BaseException: an interrupt, on its own rank; the others get a CheckpointError.
        """
        value: Any = None
        failure: BaseException | None = None
        try:
            value = body()
        except BaseException as error:  # Ctrl-C too: the others wait to hear of it
            failure = error
        if self.lane.size == 1:
            if failure is not None:
                raise failure
            return [value]
        row = {"value": value} if failure is None else {"kind": type(failure).__name__, "text": str(failure)}
        rows = [_read(text) for text in exchange_bytes(self.lane, json.dumps(row).encode())]
        failed = {rank: row for rank, row in enumerate(rows) if "kind" in row}
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if failed:
            raise _common(failed, len(rows)) from failure
        return [row["value"] for row in rows]


def _read(text: bytes) -> dict[str, Any]:
    """What a rank told.

    Raises:
        CommError: it is no row of a meeting.
    """
    try:
        row = json.loads(text)
    except ValueError:  # also of text that is no UTF-8
        row = None
    if not isinstance(row, dict) or not ("value" in row or {"kind", "text"} <= row.keys()):
        raise CommError(
            f"a rank told something else than this call expects ({text[:40]!r}): all ranks must make the same calls in "
            f"one order"
        )
    return row


def _common(failed: dict[int, dict[str, str]], ranks: int) -> Exception:
    """One error for what some ranks raised."""
    kinds = {row["kind"] for row in failed.values()}
    kind = KINDS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    texts = list(dict.fromkeys(_named(row) for row in failed.values()))
    if len(texts) == 1:
        where = "" if len(failed) in (1, ranks) else f" (on ranks {list(failed)})"
        return kind(texts[0] + where)
    rows = [f"rank {rank}: {_named(row)}" for rank, row in failed.items()]
    return kind(lines(f"{len(failed)} of {ranks} ranks failed:", rows, "What is on disk is as it was."))


def _named(row: dict[str, str]) -> str:
    """The text of an error, with its class where the class is lost on the way."""
    return row["text"] if row["kind"] in KINDS else f"{row['kind']}: {row['text']}"


def meet(mesh: Mesh, role: str) -> Meeting:
    """The ranks of a mesh, on a lane of their own for this role. Collective at its first call.

    Raises:
        PlanError: the mesh is abstract.
    """
    if mesh.size == 1:
        return Meeting(Alone(), mesh.rank)
    if mesh.transport is None:
        raise no_processes()
    return Meeting(mesh.transport.lane(role, mesh.axis_names), mesh.rank)


def only_first(rank: int, body: Callable[[], T]) -> Callable[[], T | None]:
    """What rank 0 does, and the others wait for."""
    return lambda: body() if rank == 0 else None


def same(what: str, values: Sequence[Any]) -> None:
    """Refuse values that differ between ranks.

    Raises:
        CheckpointError: they do, on all ranks alike.
    """
    if any(value != values[0] for value in values):
        rows = [f"rank {rank}: {str(value)[:200]}" for rank, value in enumerate(values)]
        raise CheckpointError(lines(f"{what} differ between ranks:", rows, "Give the same on all ranks."))
