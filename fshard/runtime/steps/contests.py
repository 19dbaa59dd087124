"""Contests of ``schedule="auto"``: steps of the run under a handful of policies, which foresight ranks, are timed."""

import math
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.exchange import exchange
from fshard.runtime.comm.facts import digest
from fshard.runtime.memory.memory_spaces import free_bytes
from fshard.schedule.auto import Auto, Choice
from fshard.schedule.contest import Contender, Round, quartile
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule

SPARE = 0.9
"""The share of free memory that contenders may take: an allocator has it in pieces."""


@dataclass(frozen=True)
class Contest:
    """A round of a program's contest so far.

    Attributes:
        round: the contenders that are in it.
        foreseen: the policy that foresight has chosen.
        seconds: what each step took on this rank.
        failed: the contenders whose step failed.
    """

    round: Round
    foreseen: Policy
    seconds: list[float] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)

    @property
    def schedule(self) -> Schedule:
        """That of the next step."""
        return self.round.contenders[self.round.who(len(self.seconds))].schedule

    @property
    def arena_bytes(self) -> int:
        """The arena of its steps."""
        return self.round.arena_bytes

    @property
    def over(self) -> bool:
        """Tell whether ranks have to meet: the round is over, or goes on without some."""
        return bool(self.failed) or len(self.seconds) >= self.round.steps

    def note(self, times: Sequence[float]) -> None:
        """Note a step that is made, on all ranks. What counts begins when all ranks have shaken hands.

        It ends with the consensus, which reads numbers of the device: so the host's clock has the device's time.

        Args:
            times: when each op began, and when the last one was over.
        """
        self.seconds.append(times[-1] - times[1])

    @property
    def dispensable(self) -> bool:
        """Tell whether the next step's policy is not foresight's choice, which would run without a contest, too."""
        return self.schedule.policy != self.foreseen

    def fail(self) -> None:
        """Note that a step has failed, on all ranks. Its contender leaves if it is dispensable."""
        if self.dispensable:
            self.failed.append(self.round.who(len(self.seconds)))

    def conclude(self, comms: Communicators, choice: Choice) -> "tuple[Choice, Contest | None]":
        """The choice by the steps so far, and the next round. Collective."""
        if self.failed:
            return self._following(choice, self.round.without(self.failed[0]))
        row = torch.tensor(self.seconds, dtype=torch.float64, device="cpu")
        seconds = exchange(comms.control, row).max(0).values.tolist()
        took = zip(self.round.contenders, self.round.times(seconds), strict=True)
        measured = {**choice.measured, **{each.policy: quartile(times) for each, times in took}}
        return self._following(replace(choice, measured=measured), self.round.after(seconds))

    def _following(self, choice: Choice, on: Round) -> "tuple[Choice, Contest | None]":
        """Return what follows if these go on: another round, or the winner."""
        if len(on.contenders) > 1:
            return choice, Contest(on, self.foreseen)
        return replace(choice, schedule=on.contenders[0].schedule), None


def opened(
    comms: Communicators, choice: Choice, auto: Auto, contenders: Callable[[int | None], tuple[Contender, ...]]
) -> Contest | None:
    """The first round of a program's contest. Collective.

    None on one rank, where rates were given, where activations are not known, or if nothing else is worth timing.

    Args:
        comms: the communicators.
        choice: by foresight.
        auto: what was asked for.
        contenders: gives the policies to time, of the bytes that a rank may take.
    """
    if comms.plan.mesh.together.size == 1 or auto.compute is not None or auto.wire is not None:
        return None
    if not choice.task.needs:
        return None
    first = Round(contenders(room(comms)))
    return Contest(first, choice.policy) if len(first.contenders) > 1 else None


def room(comms: Communicators) -> int | None:
    """The bytes that a rank may take where there are fewest; None if that is not known. Collective.

    Ranks on one host share its memory.
    """
    device = comms.plan.mesh.device
    free = free_bytes(device)
    place = digest(socket.gethostname()) % 2**32 if device.type == "cpu" else comms.plan.mesh.together.rank
    row = torch.tensor([place, math.inf if free is None else free], dtype=torch.float64, device="cpu")
    rows = exchange(comms.control, row).tolist()
    places = [place for place, _ in rows]
    least = min(free / places.count(place) for place, free in rows)
    return None if math.isinf(least) else int(SPARE * least)
