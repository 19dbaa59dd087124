"""A contest: the policies that are foreseen to be fast make steps of a run in turns, and what these take decides.

Successive halving (Jamieson and Talwalkar, 2016): all are timed for a few turns, and the best of them for some more.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from fshard.schedule.auto import TIE, Candidate, Choice
from fshard.schedule.build import build
from fshard.schedule.candidates import PolicyTask
from fshard.schedule.check import check
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule

MOST = 6
"""Contenders at most."""

WORTH = 1.3
"""Policies that are foreseen to take more than so many times the fastest are not timed."""

TURNS = (2, 6)
"""Turns that count of each round. The one before them does not: it allocates and compiles."""

NEAR, FINALISTS = 1.15, 3
"""After the first round, those within so many times the best go on, and so many of them."""


@dataclass(frozen=True)
class Contender:
    """A policy that is timed, and its schedule."""

    candidate: Candidate
    schedule: Schedule

    @property
    def policy(self) -> Policy:
        """The policy."""
        return self.candidate.policy


@dataclass(frozen=True)
class Round:
    """Contenders that take turns: in each turn, each makes a step.

    Attributes:
        contenders: at least one.
        number: which round it is.
        before: the seconds of earlier rounds, by contender.
    """

    contenders: tuple[Contender, ...]
    number: int = 0
    before: tuple[tuple[float, ...], ...] = ()

    @property
    def turns(self) -> int:
        """The turns that count."""
        return TURNS[self.number]

    @property
    def steps(self) -> int:
        """Steps of the round, one contender after the other in each turn."""
        return (1 + self.turns) * len(self.contenders)

    @property
    def last(self) -> bool:
        """Tell whether it decides."""
        return self.number == len(TURNS) - 1

    @property
    def arena_bytes(self) -> int:
        """The arena that all contenders share: the largest."""
        return max(each.schedule.memory.arena_bytes for each in self.contenders)

    def who(self, step: int) -> int:
        """The contender that makes a step. Each turn begins with another one.

        >>> three = Round((Contender(None, None),) * 3)
        >>> [three.who(step) for step in range(9)]
        [0, 1, 2, 1, 2, 0, 2, 0, 1]
        """
        turn, place = divmod(step, len(self.contenders))
        return (turn + place) % len(self.contenders)

    def times(self, seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """The seconds of each contender that count, those of earlier rounds among them.

        Args:
            seconds: of each step of the round.
        """
        count = len(self.contenders)
        found = [list(each) for each in self.before or ((),) * count]
        for step in range(count, len(seconds)):
            found[self.who(step)].append(seconds[step])
        return tuple(tuple(each) for each in found)

    def after(self, seconds: Sequence[float]) -> "Round":
        """Those that go on after this round, with their times. One alone has won.

        Args:
            seconds: of each step of the round, the same on all ranks.
        """
        times = self.times(seconds)
        sizes = [each.candidate.memory.peak_bytes for each in self.contenders]
        on = judged(times, sizes, self.last)
        return Round(tuple(self.contenders[i] for i in on), self.number + 1, tuple(times[i] for i in on))

    def without(self, lost: int) -> "Round":
        """The same round, from its begin, without one of the contenders."""
        left = [i for i in range(len(self.contenders)) if i != lost]
        before = tuple(self.before[i] for i in left) if self.before else ()
        return Round(tuple(self.contenders[i] for i in left), self.number, before)


def contenders(choice: Choice, room: int | None = None) -> tuple[Contender, ...]:
    """The policies to time: foresight's choice, and what may be faster in fact.

    That is the default policy, and for each kind of reshard and accumulation the foreseen best, and the foreseen best
    of those that gather at least two computes ahead and have two reductions in flight. Foresight takes ranks to be
    equally fast; where they are not, those wait least.

    Args:
        choice: by foresight.
        room: bytes that a step may hold, if the limit of the choice is not the only one.

    Returns:
        The default policy first, if it is among them: so a run begins as any other. All together stay within the limit
        while they share the largest arena.
    """
    chosen, limit = choice.chosen, min([each for each in (choice.budget, room) if each is not None], default=math.inf)
    found = [Contender(chosen, choice.schedule)]
    for each in _promising(choice, limit):
        schedule = scheduled(choice.task, each.policy)
        same = any((one.schedule.ops, one.schedule.groups) == (schedule.ops, schedule.groups) for one in found)
        if not same and held([*found, Contender(each, schedule)]) <= limit:
            check(schedule)
            found.append(Contender(each, schedule))
        if len(found) == MOST:
            break
    default = Policy(update=choice.policy.update)
    return tuple(sorted(found, key=lambda each: each.policy != default))


def held(contenders: Sequence[Contender]) -> int:
    """The bytes that steps of these hold at most while they share the largest arena."""
    arenas = [each.schedule.memory.arena_bytes for each in contenders]
    peaks = [each.candidate.memory.peak_bytes for each in contenders]
    return max(peak - arena for peak, arena in zip(peaks, arenas, strict=True)) + max(arenas)


def scheduled(task: PolicyTask, policy: Policy) -> Schedule:
    """The schedule that a task has under a policy."""
    return build(task.program, task.under(policy).groups, policy, task.accumulate, task.train)


def _promising(choice: Choice, limit: float) -> Iterator[Candidate]:
    """Return what to time beside foresight's choice.

    The default policy, and two of each kind, of the fastest kind first.
    """
    default, kinds = Policy(update=choice.policy.update), dict[str, list[Candidate]]()
    fits = _fitting(choice, limit)
    yield from (each for each in fits if each.policy == default)
    fastest = min((each.seconds for each in fits), default=0.0)
    for each in [each for each in fits if each.seconds <= WORTH * fastest]:
        kinds.setdefault(f"{each.policy.reshard} {each.policy.accumulation}", []).append(each)
    for kind in kinds.values():
        ahead = [each for each in kind if each.policy.prefetch >= 2 and each.policy.reduces >= 2]
        yield from (_best(some) for some in (ahead, kind) if some)


def _fitting(choice: Choice, limit: float) -> Sequence[Candidate]:
    """Candidates that fit, on the units of the choice, the fastest first."""
    mine = choice.task.again, choice.task.hosted
    found = [each for each in choice.candidates if (each.again, each.hosted) == mine]
    return [each for each in found if each.memory.peak_bytes <= limit]


def _best(some: Sequence[Candidate]) -> Candidate:
    """The foreseen best, of those that tie the one with the least memory."""
    fastest = min(each.seconds for each in some)
    close = [each for each in some if each.seconds <= TIE * fastest]
    return min(close, key=lambda each: (each.memory.peak_bytes, each.seconds))


def quartile(seconds: Sequence[float]) -> float:
    """The lower quartile of a policy's steps: what else runs on a machine only adds to a step.

    So the faster ones say most. The fastest alone may have been lucky.

    >>> quartile([3.0, 1.0, 2.0]), quartile([5.0, 4.0, 9.0, 9.0, 9.0, 9.0, 3.0])
    (1.0, 4.0)
    """
    return sorted(seconds)[max((len(seconds) + 1) // 4 - 1, 0)]


def judged(times: Sequence[Sequence[float]], sizes: Sequence[int], last: bool) -> list[int]:
    """Say which contenders go on. If one alone does, it has won.

    Times are lower quartiles. Before the last round they are held against the best median, so that a contender is out
    only if it was slow in nearly all of its steps.

    Args:
        times: the seconds of the steps of each, as all ranks have agreed on them.
        sizes: the bytes that each holds. Of those that tie in the last round the one with the least wins.
        last: whether only one may go on.

    >>> judged([[1.0], [1.05], [1.2]], [1, 1, 1], False), judged([[1.0], [1.005], [1.2]], [2, 1, 1], True)
    ([0, 1], [1])
    """
    took = [quartile(each) for each in times]
    best = min(took)
    if last:
        return [min((i for i, each in enumerate(took) if each <= TIE * best), key=lambda i: (sizes[i], took[i]))]
    typical = min(median(each) for each in times)
    near = [i for i, each in enumerate(took) if each <= NEAR * typical]
    return sorted(sorted(near, key=lambda i: took[i])[:FINALISTS])
