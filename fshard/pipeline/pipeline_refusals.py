"""Refusals of pipelines: one message builder per failure, as in ``fshard.errors``."""

from collections.abc import Iterable, Sequence

from fshard.errors import PlanError, ScheduleError, lines

SHOWN = 300
"""The most characters of a text that a message repeats."""


def bad_action(stage: object, kind: object, microbatch: object, kinds: Sequence[str]) -> PlanError:
    """An action of an unknown kind, or with numbers that are no numbers."""
    return PlanError(
        f"Action({stage!r}, {kind!r}, {microbatch!r}): the stage and the microbatch are ints of at least 0, and the "
        f"kind is one of {', '.join(kinds)}: give these"
    )


def bad_lanes(problems: Iterable[str]) -> PlanError:
    """An order whose parts do not belong together."""
    return PlanError(lines("invalid order of a pipeline:", problems, "Give one home a stage, and one list a rank."))


def unknown_order(name: object, known: Iterable[str], hint: str) -> PlanError:
    """A name of no schedule."""
    return PlanError(f"make_order({name!r}, ...): unknown schedule{hint}: give one of {', '.join(known)}")


def bad_sizes(name: str, problems: Iterable[str], remedy: str) -> PlanError:
    """Numbers of ranks, microbatches or chunks that a schedule cannot have."""
    return PlanError(lines(f"make_order({name!r}, ...) cannot be made:", problems, remedy))


def unreadable_order(number: int, line: str, problem: str) -> ScheduleError:
    """A malformed line of an order's text."""
    line, problem = (text if len(text) <= SHOWN else f"{text[:SHOWN]}..." for text in (line, problem))
    head = f"line {number} of the text of a pipeline, {line!r}: {problem}"
    return ScheduleError(f"{head}; give parse the text of str(order)")
