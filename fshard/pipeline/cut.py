"""Cutting a model's units into the stages of a pipeline."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from fshard.patterns import glob, glob_matches, glob_meant
from fshard.pipeline import pipeline_refusals

Cut = str | Sequence[int] | Sequence[str]
"""``"balanced"``, the number of units of each stage, or where each stage begins."""


def cut_units(units: Sequence[str], costs: Sequence[float], stages: int, cut: Cut = "balanced") -> tuple[int, ...]:
    """Find the stage of each unit. A stage has units that follow one another.

    Args:
        units: the names of the units, in the order in which they are called.
        costs: what each unit costs, in any measure, such as seconds. Only ``"balanced"`` reads it.
        stages: the number of stages.
        cut: ``"balanced"``; or the number of units of each stage, as ``(4, 4, 5)``; or for each stage a name or glob of
            units or of modules around them, at whose first unit it begins, as ``("embed", "layers.4", "layers.8")``.
            ``"balanced"`` makes the largest cost of a stage as small as it can be; among the ways to do so it takes
            that with the fewest units in the last stage, then in the one before it, and so on.

    Returns:
        For each unit the number of its stage, from 0, in ascending order.

    Raises:
        PlanError: a stage has no unit, counts do not sum to the number of units, a pattern matches no unit, matches
            inside of one or is out of order, a cost is no number of at least 0, or there are more stages than units.

    >>> cut_units(["embed", "layers.0", "layers.1", "layers.2", "head"], [1, 2, 2, 2, 3], 2)
    (0, 0, 0, 1, 1)
    >>> cut_units(["embed", "layers.0", "layers.1", "head"], [1, 1, 1, 1], 2, ("embed", "layers.1"))
    (0, 0, 1, 1)
    """
    units = list(units)
    if problems := [*_misfits(units, stages)]:
        raise pipeline_refusals.bad_cut(cut, problems, "Give fewer stages, or split the model into more units.")
    if isinstance(cut, str):
        starts = _balanced(units, costs, stages, cut)
    elif all([type(count) is int for count in cut]):
        starts = _counted(len(units), stages, [int(count) for count in cut])
    else:
        starts = _named(units, stages, cut)
    ends = [*starts[1:], len(units)]
    return tuple(
        [number for number, (start, end) in enumerate(zip(starts, ends, strict=True)) for _ in range(start, end)]
    )


def _misfits(units: list[str], stages: object) -> Iterator[str]:
    """List what is wrong whatever the cut is."""
    if type(stages) is not int or stages < 1:
        yield f"stages={stages!r} is no int of at least 1"
    elif stages > len(units):
        yield f"there are {stages} stages and {len(units)} units, and each stage needs one"


def _counted(units: int, stages: int, counts: list[int]) -> list[int]:
    """The first unit of each stage, from the numbers of units."""
    problems = []
    if len(counts) != stages:
        problems.append(f"there are {len(counts)} counts and {stages} stages")
    problems += [f"stage {number} has {count} units" for number, count in enumerate(counts) if count < 1]
    if sum(counts) != units:
        problems.append(f"the counts sum to {sum(counts)}, and there are {units} units")
    if problems:
        remedy = f"Give {stages} counts of at least 1 that sum to {units}."
        raise pipeline_refusals.bad_cut(tuple(counts), problems, remedy)
    return [sum(counts[:number]) for number in range(stages)]


def _named(units: list[str], stages: int, cut: Sequence[object]) -> list[int]:
    """The first unit of each stage, from patterns."""
    problems = [] if len(cut) == stages else [f"there are {len(cut)} patterns and {stages} stages"]
    starts: list[int] = []
    for number, pattern in enumerate(cut):
        start, problem = _first(units, pattern)
        if number == 0 and start:
            problem = f"{pattern!r} begins stage 0 at {units[start]!r}, which leaves out {units[0]!r}"
        elif starts and 0 <= start <= starts[-1]:
            at = f"{pattern!r} begins stage {number} at {units[start]!r}"
            problem = f"{at}, and stage {number - 1} begins at {units[starts[-1]]!r}: stage {number - 1} would be empty"
        problems += [problem] if problem else []
        starts += [start] if start >= 0 else []
    if problems:
        remedy = f"Give {stages} names or globs of units, each of the first unit of a stage, in the order of the units."
        raise pipeline_refusals.bad_cut(tuple(cut), problems, remedy)
    return starts


def _first(units: list[str], pattern: object) -> tuple[int, str]:
    """The first unit that a pattern matches, or -1 and why there is none."""
    if not isinstance(pattern, str) or not pattern:
        return -1, f"{pattern!r} is no pattern of unit names"
    regex = re.compile(glob(pattern))
    start = next((number for number, unit in enumerate(units) if regex.fullmatch(unit)), -1)
    if start >= 0:
        return start, ""
    parts = pattern.split(".")
    around = [".".join(parts[:number]) for number in range(1, len(parts))]
    within = [unit for unit in units if any([glob_matches(above, unit) for above in around])]
    if within:
        return -1, f"{pattern!r} is inside of the unit {within[0]!r}, which cannot be cut"
    return -1, f"{pattern!r} matches no unit{glob_meant(pattern, units)}"


def _balanced(units: list[str], costs: Sequence[float], stages: int, cut: str) -> list[int]:
    """The first unit of each stage so that the most costly stage costs least."""
    remedy = 'Give "balanced", counts of units, or patterns of the units that begin stages.'
    if cut != "balanced":
        raise pipeline_refusals.bad_cut(cut, ["it is the name of no way to cut"], remedy)
    problems = [f"there are {len(costs)} costs and {len(units)} units"] if len(costs) != len(units) else []
    for unit, cost in zip(units, costs, strict=False):
        if isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            problems.append(f"unit {unit!r} costs {cost!r}")
    if problems:
        raise pipeline_refusals.bad_cut(cut, problems, "Give one finite cost of at least 0 for each unit.")
    whole = _integers(costs)
    limit = _smallest(max(whole), sum(whole), lambda limit: _filled(whole, limit)[1] <= stages)
    return _filled(whole, limit, stages)[0]


def _integers(costs: Sequence[float]) -> list[int]:
    """Costs of the same ratios that add up without rounding."""
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*[cost.denominator for cost in exact])
    return [int(cost * scale) for cost in exact]


def _smallest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The smallest number from ``low`` to ``high`` that fits, if all larger ones do."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _filled(costs: list[int], limit: int, stages: int = 1) -> tuple[list[int], int]:
    """Fill one stage after the other up to a limit, and leave one unit at least for each of the later ``stages``.

    Stages that are as full as they can be from the front have the fewest units at the end.
    """
    starts, total = [0], 0
    for number, cost in enumerate(costs):
        later = stages - len(starts)
        if number > starts[-1] and (total + cost > limit or len(costs) - number <= later):
            starts.append(number)
            total = 0
        total += cost
    return starts, len(starts)
