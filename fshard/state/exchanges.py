"""Exchanges of replicas that train apart. A state holds them, since a fragment may be under way in it."""

import json
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Self

from fshard.errors import PlanError

ANCHOR = "anchor"
"""The name of what all replicas agree on, in the state of the optimizer: the parameters after the latest exchange."""

MOST = 10_000
"""Steps that are looked through for one after which nothing is under way; and fragments that a text may tell of."""


@dataclass(frozen=True)
class Timetable:
    """Times at which fragments leave and arrive.

    Attributes:
        every: the steps between two departures of a fragment.
        delay: the steps between its departure and its arrival.
        number: of fragments.

    >>> table = Timetable(every=30, delay=2, number=4)
    >>> [(step, table.leaving(step)) for step in range(1, 40) if table.leaving(step) is not None]
    [(7, 1), (15, 2), (22, 3), (30, 0), (37, 1)]
    >>> table.arriving(9), table.under_way(8), table.under_way(9), table.count(1, 37)
    (1, {1: 7}, {}, 2)
    """

    every: int
    delay: int
    number: int

    def offset(self, fragment: int) -> int:
        """The first step after which a fragment leaves, modulo ``every``."""
        return fragment * self.every // self.number

    def leaving(self, step: int) -> int | None:
        """The fragment that leaves after a step; None if there is none."""
        found = [f for f in range(self.number) if step > 0 and (step - self.offset(f)) % self.every == 0]
        return found[0] if found else None

    def arriving(self, step: int) -> int | None:
        """The fragment that arrives after a step."""
        return self.leaving(step - self.delay)

    def under_way(self, step: int) -> dict[int, int]:
        """The fragments that have left and not arrived when a step is over, each with the step after which it left."""
        left = {f: step - (step - self.offset(f)) % self.every for f in range(self.number)}
        return {f: at for f, at in sorted(left.items(), key=lambda one: one[1]) if at > max(0, step - self.delay)}

    def count(self, fragment: int, left: int) -> int:
        """The number of the exchange of a fragment that left after a step, from 1."""
        offset = self.offset(fragment)
        return (left - offset) // self.every + (offset > 0)


class Exchanges(NamedTuple):
    """Exchanges by the steps at which they travel.

    Attributes:
        table: when fragments leave and arrive.
        fragments: their number, or patterns.
        over: the axis of replicas.

    >>> exchanges = Exchanges(Timetable(every=4, delay=2, number=2), 2, "replica")
    >>> exchanges.text
    '{"every": 4, "delay": 2, "fragments": 2, "over": "replica"}'
    >>> Exchanges.read(exchanges.text) == exchanges
    True
    """

    table: Timetable
    fragments: int | tuple[str, ...]
    over: str

    def __str__(self) -> str:
        return f"every={self.table.every}, fragments={self.fragments!r}, delay={self.table.delay}"

    @property
    def text(self) -> str:
        """All of it, as a checkpoint holds it."""
        table, fragments = self.table, self.fragments if isinstance(self.fragments, int) else list(self.fragments)
        return json.dumps({"every": table.every, "delay": table.delay, "fragments": fragments, "over": self.over})

    @classmethod
    def read(cls, text: str) -> Self:
        """The exchanges of a text.

        Raises:
            ValueError, TypeError, KeyError: the text is not that of exchanges.
        """
        try:
            found = json.loads(text)
        except RecursionError as error:
            raise ValueError("exchanges, nested too deeply") from error
        every, delay, given, over = (found[name] for name in ("every", "delay", "fragments", "over"))
        fragments = given if isinstance(given, int) else tuple(map(str, given))
        number = fragments if isinstance(fragments, int) else len(fragments)
        counts = type(every) is int and type(delay) is int and type(number) is int
        if not counts or not 0 <= delay < every or not 1 <= number <= min(every, MOST):
            raise ValueError(f"exchanges every {every} steps of {number} fragments, which travel for {delay}")
        return cls(Timetable(every, delay, number), fragments, str(over))

    def refuse(self) -> NoReturn:
        """Refuse a step that makes no exchanges.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            f"the state is one of fs.outer(step, ..., {self}), and this step makes no exchanges: what is under way "
            f"between replicas would be lost. Go on with such an outer step; or restore parameters alone, with rules= "
            f"and into=fs.init_state(plan, opt)"
        )


def calm_step(step: int, *tables: Timetable) -> int | None:
    """The first step from this one on after which nothing is under way by any of these tables; None if there is none.

    >>> calm_step(5, Timetable(every=4, delay=2, number=1)), calm_step(5, Timetable(every=2, delay=1, number=2))
    (6, None)
    """
    period = 4
    for table in tables:
        period *= table.every
    calm = range(step, step + min(period, MOST))
    return next((n for n in calm if not any(table.under_way(n) for table in tables)), None)
