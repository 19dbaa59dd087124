"""Orders that have names, made from tables of phases.

A phase is a number of repeats and the moves of one repeat, such as ``(7, "F B")``. A move takes the next action of its
kind that is due on the rank; where none is due, it does nothing. So one table serves all numbers of microbatches, and
the same loop makes every schedule. ``F1`` is a move of the second stage of a rank, ``F`` one of the stage whose turn it
is; ``I`` makes a ``W`` due.

===============  ====================================================================================================
name             published by
===============  ====================================================================================================
``gpipe``        Huang et al., "GPipe", 2019. With chunks, all microbatches pass one stage of a rank before its next
``1f1b``         Narayanan et al., "PipeDream", 2019, flushed at each step (Megatron-LM, DAPPLE)
``interleaved``  Narayanan et al., "Efficient large-scale language model training on GPU clusters", 2021
``zb_h1``        Qi et al., "Zero bubble pipeline parallelism", 2023. With chunks, the interleaved form of it
``zbv``          Qi et al., 2023, section 6. No idle time between a rank's actions where F, I and W take as long
``dualpipev``    DeepSeek-AI, "DualPipe", 2025, cut in half by Sea AI Lab, so that no rank holds two copies of a stage
===============  ====================================================================================================

An order in rounds (``interleaved``, ``zb_h1``) takes any number of microbatches: rounds differ by one in size where
the ranks do not divide it, which costs no idle time. An order in a V that has fewer microbatches than its phases fill
is made for that many, and the others are left out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fshard.patterns import closest
from fshard.pipeline import pipeline_refusals
from fshard.pipeline.orders import Action, PipelineOrder

Phases = list[tuple[int, str]]
"""Phases of a rank, in order."""


@dataclass(frozen=True)
class PipelineSizes:
    """Sizes that an order is made for.

    Attributes:
        ranks: positions on the stage axis.
        microbatches: microbatches of a step.
        chunks: stages a rank.

    >>> PipelineSizes(4, 9, 2).rounds
    [5, 4]
    """

    ranks: int
    microbatches: int
    chunks: int

    @property
    def rounds(self) -> list[int]:
        """Divide the microbatches into rounds of at least one a rank, as equal as they can be, larger ones first.

        >>> PipelineSizes(4, 3, 2).rounds
        [3]
        """
        count = max(1, self.microbatches // self.ranks)
        each, more = divmod(self.microbatches, count)
        return [each + (number < more) for number in range(count)]

    @property
    def all(self) -> int:
        """Count the forwards of one rank.

        >>> PipelineSizes(4, 9, 2).all
        18
        """
        return self.microbatches * self.chunks


def _gpipe(sizes: PipelineSizes, rank: int) -> Phases:
    return [(sizes.all, "F"), (sizes.all, "B")]


def _one_f_one_b(sizes: PipelineSizes, rank: int) -> Phases:
    return [(sizes.ranks - 1 - rank, "F"), (sizes.all, "F B")]


def _interleaved(sizes: PipelineSizes, rank: int) -> Phases:
    ahead = (sizes.chunks - 1) * sizes.rounds[0] + 2 * (sizes.ranks - 1 - rank)
    return [(ahead, "F"), (sizes.all, "F B")]


def _zb_h1(sizes: PipelineSizes, rank: int) -> Phases:
    ahead = (sizes.chunks - 1) * sizes.rounds[0] + sizes.ranks - 1 - rank
    return [(ahead, "F"), (rank, "F I"), (sizes.all, "F I W"), (sizes.all, "W")]


def _zbv(sizes: PipelineSizes, rank: int) -> Phases:
    after, count = sizes.ranks - rank, sizes.microbatches
    rise = [(2 * after - 1, "F0"), (rank, "F1 F0"), (after, "F1 I1 W1")]
    fall = [(rank, "I0 I1"), (after, "I0 W0"), (count, "W1"), (count, "W0")]
    return [*rise, (count - sizes.ranks, "F0 I0 W0 F1 I1 W1"), *fall]


def _dualpipev(sizes: PipelineSizes, rank: int) -> Phases:
    after, both = sizes.ranks - 1 - rank, sizes.microbatches - 2 * sizes.ranks + rank + 1
    rise = [(2 * after, "F0"), (rank + 1, "F0 F1"), (after, "I1 W F1")]
    fall = [(after, "B1 F1 B0"), *_alternating(rank + 1), (after, "W I0"), (rank + 1, "W")]
    return [*rise, (both, "F0 B1 F1 B0"), *fall]


def _alternating(count: int) -> Phases:
    """Phases of backwards of both stages in turn: the first ``count`` whole, as many more in two parts."""
    moves = [f"{'B' if number < count else 'I'}{1 - number % 2}" for number in range(2 * count)]
    return [(1, " ".join(moves))]


@dataclass(frozen=True)
class OrderRules:
    """The rules of one order.

    Attributes:
        phases: the phases of a rank.
        least, most: the stages that a rank may have.
        whole: the fewest microbatches that its phases are made for, given the ranks, in an order of the shape of a V.
        rounds: whether microbatches pass in rounds, one for each rank; else all together.
    """

    phases: Callable[[PipelineSizes, int], Phases]
    least: int
    most: int | None
    whole: Callable[[int], int] | None = None
    rounds: bool = True

    @property
    def folded(self) -> bool:
        """Tell whether stages go down the ranks and up again, in the shape of a V."""
        return self.whole is not None


ORDERS: Mapping[str, OrderRules] = MappingProxyType(
    {
        "gpipe": OrderRules(_gpipe, 1, None, rounds=False),
        "1f1b": OrderRules(_one_f_one_b, 1, 1),
        "interleaved": OrderRules(_interleaved, 2, None),
        "zb_h1": OrderRules(_zb_h1, 1, None),
        "zbv": OrderRules(_zbv, 2, 2, whole=lambda ranks: 2 * ranks - 1),
        "dualpipev": OrderRules(_dualpipev, 2, 2, whole=lambda ranks: 2 * ranks),
    }
)
"""The orders that have names."""


def make_order(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> PipelineOrder:
    """Make an order that has a name.

    Stage s is on rank s % ranks, except in ``"zbv"`` and ``"dualpipev"``, where stages go up the ranks and back down:
    rank r has the stages r and 2 * ranks - 1 - r.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zb_h1"``, ``"zbv"`` or ``"dualpipev"``.
        ranks: positions on the stage axis, at least 1.
        microbatches: microbatches of a step, at least 1. Every schedule takes any number, also fewer than ranks.
        chunks: stages a rank: 1 for ``"1f1b"``, at least 2 for ``"interleaved"``, 2 for ``"zbv"`` and ``"dualpipev"``.
            By default the least that the schedule has.

    Returns:
        The order.

    Raises:
        PlanError: the name is unknown, or the schedule cannot have these numbers.

    >>> print(make_order("1f1b", 2, 3))
    pipeline 1f1b
    homes 0 1
    rank 0  0F0 0F1     0B0 0F2 0B1     0B2
    rank 1      1F0 1B0 1F1 1B1 1F2 1B2
    <BLANKLINE>
    """
    if name not in ORDERS:
        raise pipeline_refusals.unknown_order(name, ORDERS, closest(str(name), ORDERS))
    rules = ORDERS[name]
    chunks = rules.least if chunks is None else chunks
    _refuse_sizes(name, ranks, microbatches, chunks)
    whole = microbatches if rules.whole is None else max(microbatches, rules.whole(ranks))
    sizes = PipelineSizes(ranks, whole, chunks)
    homes = [stage % ranks for stage in range(ranks * chunks)]
    if rules.folded:
        homes = [*range(ranks), *reversed(range(ranks))]
    lanes = [_lane(rules, sizes, homes, rank) for rank in range(ranks)]
    # Actions of different microbatches do not wait for each other, so leaving some microbatches out stalls no rank.
    kept = [tuple([action for action in lane if action.microbatch < microbatches]) for lane in lanes]
    return PipelineOrder(name, tuple(homes), tuple(kept))


def fitting_orders(chunks: int, placement: str) -> list[str]:
    """The names of the orders of ranks with so many stages each, which lie in a loop or go forth and back, ``"v"``.

    >>> fitting_orders(1, "loop"), fitting_orders(2, "v")
    (['gpipe', '1f1b', 'zb_h1'], ['zbv', 'dualpipev'])
    """
    able = {name: its for name, its in ORDERS.items() if its.least <= chunks <= (its.most or chunks)}
    return [name for name, its in able.items() if its.folded == (placement == "v")]


def _lane(rules: OrderRules, sizes: PipelineSizes, homes: list[int], rank: int) -> list[Action]:
    """Play the phases of a rank."""
    stages = [stage for stage, home in enumerate(homes) if home == rank]
    rounds = sizes.rounds if rules.rounds else [sizes.microbatches]
    due = {"F": _turns(stages, rounds), "B": _turns(stages[::-1], rounds), "W": []}
    lane = []
    for repeats, moves in rules.phases(sizes, rank):
        for move in moves.split() * repeats:
            kind, of = move[0], stages[int(move[1:])] if move[1:] else None
            queue = due["B" if kind == "I" else kind]
            at = next((at for at, (stage, _) in enumerate(queue) if of in (None, stage)), None)
            if at is not None:
                stage, microbatch = queue.pop(at)
                lane.append(Action(stage, kind, microbatch))
                due["W"] += [(stage, microbatch)] if kind == "I" else []
    return lane


def _turns(stages: list[int], rounds: list[int]) -> list[tuple[int, int]]:
    """The stages and microbatches of a rank in turn: a round passes one stage after the other."""
    turns, first = [], 0
    for size in rounds:
        turns += [(stage, first + number) for stage in stages for number in range(size)]
        first += size
    return turns


def _refuse_sizes(name: str, ranks: object, microbatches: object, chunks: object) -> None:
    """Refuse numbers that an order cannot have."""
    given = (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks))
    wrong = [
        f"{what}={value!r} is no int of at least 1" for what, value in given if type(value) is not int or value < 1
    ]
    if wrong:
        raise pipeline_refusals.bad_sizes(name, wrong, "Give ints of at least 1.")
    rules = ORDERS[name]
    if type(chunks) is int and not rules.least <= chunks <= (rules.most or chunks):
        held = f"exactly {rules.least}" if rules.most == rules.least else f"at least {rules.least}"
        fits = [other for other, its in ORDERS.items() if its.least <= chunks <= (its.most or chunks)]
        remedy = f"Give chunks={rules.least}, leave it out, or use one of {', '.join(fits)}."
        raise pipeline_refusals.bad_sizes(name, [f"chunks={chunks}, and a rank has {held} of its stages"], remedy)
