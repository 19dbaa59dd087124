"""Exchanges between ranks that are at one sharded loss.

Outside of a step ranks meet on the control communicator. Inside of a step function they meet in a collective of its
code: the step itself says at its end what went wrong on any rank, and its handshake has compared what must be equal.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fshard.collectives.scope import SCOPE, cutting
from fshard.errors import CommError, PeerError, ScheduleError, lines
from fshard.runtime.comm import Facts, announce, digest, exchange_text, mesh_communicator, told
from fshard.runtime.comm.call_site import call_site
from fshard.runtime.comm.facts import compare_numbers
from fshard.runtime.engine import fingerprint
from fshard.runtime.engine.loss_result import Loss
from fshard.runtime.execution.executor import diverged
from fshard.runtime.steps import raise_failure
from fshard.runtime.steps.batch_rows import NUMBERS, BatchRows, uneven_rows
from fshard.runtime.steps.consensus import CUT, FAILED, OK
from fshard.runtime.steps.step_refusals import unlike_losses
from fshard.sharding.mesh import Mesh
from fshard.state.equal import Equal
from fshard.torch_internals import DisableFuncTorch
from fshard.transform.active_transforms import transforms_text

TEXT = 512
"""Bytes of a text that ranks exchange inside of a step function."""

APART = "; "
"""Between the place of a rank in a loss and the transforms that it is under, in texts."""


@dataclass(frozen=True)
class LossMeeting:
    """The ranks of a mesh at one call of a sharded loss.

    Attributes:
        batch: this rank's batch.
        sizes: the dims of a batch that ranks share.
        running: the step function that makes the call; None outside of one.
        under: the transforms around the call, as text; empty where there is none.
    """

    mesh: Mesh
    batch: Any
    sizes: BatchRows
    running: Any
    under: str = ""

    def facts(self, equal: Equal) -> Facts:
        """Facts that the handshake compares. A step function compares them at its beginning."""
        if self.running is not None:
            self.running.differentiate(equal)
        return Facts() if self.running is not None or self.mesh.size == 1 else equal.fixed()

    def all_ranks(self, place: str, body: Callable[[], Any], facts: Facts = Facts()) -> Any:  # noqa: B008 - frozen
        """Return the result of ``body``; an error of any rank is raised on all."""
        value, failure = None, None
        try:
            with cutting(self.mesh):  # others may wait in a collective, and learn of a failure only here
                value = body()
        except (PeerError, ScheduleError):
            raise  # the other ranks know
        except CommError as error:
            # A rank that failed cut this collective off, or the connection to a rank was lost.
            if self.running is None:
                with suppress(CommError):
                    self.handshake(place, failure=error)
            raise
        except Exception as error:
            if self.running is not None or told(error):
                raise  # the step tells the others, or a call inside of the body did
            failure = error
        self.handshake(place, value if isinstance(value, Loss) else None, failure, facts)
        return value

    def handshake(
        self,
        place: str,
        loss: Loss | None = None,
        failure: Exception | None = None,
        facts: Facts = Facts(),  # noqa: B008 - a frozen value
    ) -> None:
        """Raise on all ranks the failure of any of them, and refuse losses without a common mean.

        A rank that fails takes part in one more exchange, which has the same form wherever the other ranks are. A rank
        that failed because another one cut its collective off raises that rank's failure.
        """
        status = OK if failure is None else CUT if isinstance(failure, CommError) else FAILED
        mine = [status, digest((place, self.under)), facts.number, *_mean_row(self.batch, loss, self.sizes)]
        with DisableFuncTorch():  # a transform under way would wrap what is sent
            rows = self.rows(mine)
            self._compare(rows, place, failure, status, facts)
        if any(row[3:6] != rows[0][3:6] for row in rows):
            raise unlike_losses([(bool(row[3]), row[4], row[5]) for row in rows])
        if uneven := self.sizes.uneven([row[6:] for row in rows]):
            raise uneven_rows(uneven)

    def _compare(
        self, rows: Sequence[Sequence[int]], place: str, failure: Exception | None, status: int, facts: Facts
    ) -> None:
        """Raise what a rank failed with, or how ranks differ. Collective if there is either."""
        if any(row[0] > OK for row in rows):
            raise_failure(mesh_communicator(self.mesh), failure, [row[0] for row in rows], status)
        if self.running is None:
            compare_numbers(mesh_communicator(self.mesh), [row[2] for row in rows], facts)
        if any(row[1] != rows[0][1] for row in rows):
            raise _apart(self._texts(f"{place}{APART}{self.under}, {call_site()}"))

    def rows(self, mine: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank. Collective."""
        if self.running is None:
            return announce(mesh_communicator(self.mesh), "sharded loss", mine)
        found: list[list[int]] = self.running.meet(self.mesh, mine)
        return found

    def _texts(self, text: str) -> Sequence[str]:
        if self.running is None:
            return exchange_text(mesh_communicator(self.mesh), text)
        rows = self.rows([*text.encode()[:TEXT].ljust(TEXT)])
        return [bytes(row).decode(errors="replace").rstrip() for row in rows]


def meeting(mesh: Mesh, batch: Any, sizes: BatchRows, params: Any = None) -> LossMeeting:
    """The ranks of a mesh at a call that begins. Its parameters and its batch tell which transforms it is under."""
    scope = SCOPE.get()
    under = transforms_text(params, batch) if mesh.size > 1 else ""
    return LossMeeting(mesh, batch, sizes, None if scope is None else scope.running, under)


def _apart(texts: Sequence[str]) -> ScheduleError:
    """The error of ranks that are at different places of a loss, or at one under different transforms."""
    places = {text.partition(APART)[0] for text in texts}
    if len(places) > 1:
        return diverged([text.replace(f"{APART}, ", ", ").replace(APART, ", ") for text in texts])
    found = [text.partition(APART)[2] for text in texts]
    rows = [f"rank {rank}: {'under no transform' * text.startswith(', ')}{text}" for rank, text in enumerate(found)]
    return ScheduleError(
        lines(
            f"ranks are at {places.pop()} under different transforms, which would make different collectives:",
            rows,
            "Apply the same transforms by the same arguments on all ranks, in one order. Nothing was sent or changed.",
        )
    )


def _mean_row(batch: Any, loss: Loss | None, rows: BatchRows) -> list[int]:
    """Return what losses with a common mean share, and the sizes of the batch; zeros where there is no plain mean."""
    if loss is None:
        return [0] * (3 + NUMBERS)
    weighted = loss.count is not None
    return [int(weighted), *fingerprint(loss.aux), *([0] * NUMBERS if weighted else rows.numbers(batch))]
