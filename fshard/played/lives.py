"""Lives of the communicators of played ranks: a rank that gives up ends the life of its own.

As between processes: peers that wait for the rank there, or come there later, get an error at once. A rank whose own
communicators have ended begins a new life of them with its next call, and meets those that have done the same.
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Lives:
    """The lives of communicators in one run, by role and rank.

    Attributes:
        number: how many lives of a role a rank has ended.
        joined: who has used the present life of a role.
        reasons: why ranks have ended a life of a role.
    """

    number: dict[tuple[str, int], int] = field(default_factory=dict)
    joined: set[tuple[str, int]] = field(default_factory=set)
    reasons: dict[tuple[str, int], dict[int, str]] = field(default_factory=dict)

    def join(self, role: str, rank: int) -> int:
        """A rank uses communicators of a role. Returns the number of their life."""
        self.joined.add((role, rank))
        return self.number.get((role, rank), 0)

    def end(self, role: str, rank: int, reason: str) -> None:
        """A rank gives up. Does nothing if it has not used communicators of the role since it last did."""
        if (role, rank) in self.joined:
            self.joined.discard((role, rank))
            life = self.number.get((role, rank), 0)
            self.number[role, rank] = life + 1
            self.reasons.setdefault((role, life), {})[rank] = reason

    def part(self, role: str, elsewhere: dict[int, str]) -> None:
        """No rank can go on: end a life that some ranks use for those that never did, and wait elsewhere.

        Between processes these meet in no collective of the role either: its communicator is not made.

        Args:
            role: of the communicators.
            elsewhere: where each rank waits.
        """
        lives = {self.number.get((role, rank), 0) for rank in elsewhere if (role, rank) in self.joined}
        for rank, place in elsewhere.items():
            if (role, rank) not in self.joined and self.number.get((role, rank), 0) in lives:
                self.joined.add((role, rank))
                self.end(role, rank, f"it waits for {place}")

    def gone(self, role: str, life: int, members: tuple[int, ...]) -> str:
        """Say which of some ranks have given up a life of a role, and why; empty if none has.

        >>> lives = Lives()
        >>> life = lives.join("collectives", 1)
        >>> lives.end("collectives", 1, "ValueError: no data")
        >>> lives.gone("collectives", life, (0, 1))
        'rank 1 gave up: ValueError: no data'
        """
        reasons = self.reasons.get((role, life), {})
        return "; ".join(f"rank {rank} gave up: {reasons[rank]}" for rank in members if rank in reasons)
