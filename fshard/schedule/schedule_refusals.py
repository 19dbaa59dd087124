"""Refusals of policies, programs and schedules: one message builder per failure, as in ``fshard.errors``."""

from collections.abc import Iterable, Mapping, Sequence

from fshard.errors import PlanError, ScheduleError, lines

SHOWN = 300
"""The most characters of a text that a message repeats."""


def bad_policy(problems: Iterable[str]) -> PlanError:
    """A policy with values of the wrong type or out of range."""
    return PlanError(lines("invalid policy:", problems, "Give values of the types and ranges in its docstring."))


def bad_costs(problems: Iterable[str]) -> PlanError:
    """Costs with values out of range, or of unknown ops."""
    return PlanError(lines("invalid costs:", problems, "Give seconds, and bytes a second, of the ops that are there."))


def other_mesh(lacking: Sequence[str], names: Sequence[str]) -> PlanError:
    """A mesh without the axes of a schedule."""
    return PlanError(
        f"the schedule has transfers over {', '.join(lacking)}, and the axes of the mesh are {', '.join(names)}: give "
        f"the mesh of its plan"
    )


def memory_too_small(budget: int, least: str, policy: str, items: Sequence[str]) -> PlanError:
    """A limit on memory that every schedule exceeds."""
    most = " Most of it is:" if items else ""
    head = f"memory={budget} bytes is too small for every schedule: the smallest takes {least}, with {policy}.{most}"
    return PlanError(lines(head, items, "Allow that much, use smaller units, more ranks or a smaller batch."))


def unknown_rates(missing: Sequence[str]) -> PlanError:
    """A choice of schedule before its inputs were given or measured."""
    given = ", ".join(f"{name}=..." for name in missing)
    return PlanError(
        f"schedule='auto' needs {' and '.join(missing)}, which the first step measures, and no step was made: make a "
        f"step first, or give the numbers: schedule=fs.Auto({given})"
    )


def no_unit_to_keep(patterns: Mapping[str, str], units: Sequence[str]) -> PlanError:
    """Globs of ``fs.keep`` that match no unit of the program, each with a hint."""
    some = ", ".join(units[:8]) + (", ..." if len(units) > 8 else "") or "none at all"
    rows = [f"{pattern!r} matches none{hint}" for pattern, hint in patterns.items()]
    return PlanError(
        lines(f"fs.keep names units that this program never calls; it calls {some}:", rows, "Remove them.")
    )


def bad_program(problems: Iterable[str]) -> PlanError:
    """A program, groups or a number of microbatches that no schedule can be built from."""
    remedy = "Name each call once, in order, and name groups by their position among the groups."
    return PlanError(lines("no schedule can be built from this program:", problems, remedy))


def broken_lifetime(item: str, at: int, op: str, problem: str) -> ScheduleError:
    """An op begins or ends the lifetime of an arena item out of order."""
    remedy = "call fshard.schedule.check, which shows the rule that the ops break"
    return ScheduleError(f"{item} at op {at}, '{op}': {problem}; {remedy}")


def broken_schedule(problem: str, excerpt: Iterable[str]) -> ScheduleError:
    """An op that breaks a rule, among its neighbours."""
    remedy = "Build the schedule again from its program, or undo the changes to its text."
    return ScheduleError(lines(f"this schedule cannot run: {problem}", excerpt, remedy))


def unreadable_schedule(number: int, line: str, problem: str) -> ScheduleError:
    """A malformed line of a schedule's text."""
    line, problem = (text if len(text) <= SHOWN else f"{text[:SHOWN]}..." for text in (line, problem))
    head = f"line {number} of the schedule's text, {line!r}: {problem}"
    return ScheduleError(f"{head}; give parse the text of str(schedule)")
