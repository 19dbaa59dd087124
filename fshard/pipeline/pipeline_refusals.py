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


def broken_order(name: str, problem: str, excerpt: Iterable[str]) -> ScheduleError:
    """An order that ranks cannot run, with the lanes around the action that fails."""
    remedy = "Make the order again with make_order, or undo the changes to its lists."
    return ScheduleError(lines(f"the order {name} cannot run: {problem}", excerpt, remedy))


def bad_cell(row: int, column: int, cell: str, problem: str) -> ScheduleError:
    """A cell of a CSV file that cannot be read, or that contradicts others. Rows and columns count from 1."""
    cell = cell if len(cell) <= SHOWN else f"{cell[:SHOWN]}..."
    return ScheduleError(f"row {row} (rank {row - 1}), column {column}, {cell!r}: {problem}")


def bad_table(problem: str) -> ScheduleError:
    """A CSV file whose rows do not make an order."""
    return ScheduleError(f"the rows make no order of a pipeline: {problem}: give a row a rank, with cells such as 0F0")


def bad_action_costs(problems: Iterable[str]) -> PlanError:
    """Costs of actions that are no times, or that lack a stage."""
    remedy = "Give seconds of at least 0: a number, a mapping from each stage, or a function of the stage."
    return PlanError(lines("invalid costs of actions:", problems, remedy))


def bad_cut(cut: object, problems: Iterable[str], remedy: str) -> PlanError:
    """A way of cutting units into stages that cannot be."""
    text = repr(cut)
    shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    return PlanError(lines(f"cut={shown} does not cut the units into stages:", problems, remedy))
