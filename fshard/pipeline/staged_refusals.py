"""Refusals of programs that cannot be cut into the stages of a plan: one message builder per failure."""

from collections.abc import Mapping, Sequence

from fshard.errors import PlanError, ScheduleError, lines


def depends_on_values() -> PlanError:
    """A program that no trace can follow."""
    return PlanError(
        "stages: the program depends on values of tensors (.item(), a mask, if loss > 1), and a pipeline must know its "
        "units and what goes between ranks before it runs: compute that inside of a unit, or make the plan without "
        "stages="
    )


def differentiates_units(units: Sequence[str]) -> PlanError:
    """A loss that takes derivatives of units."""
    return PlanError(
        f"stages: the loss function differentiates {', '.join(units)} itself, which other ranks may hold: take such "
        f"derivatives inside of a unit, or make the plan without stages="
    )


def bad_cut(problems: Sequence[str]) -> PlanError:
    """Calls of units that do not go from stage to stage in order."""
    remedy = "Give cut= so that units are in stages in the order of their calls: fs.Stages(axis, cut=(2, 3))."
    return PlanError(lines("stages: the program cannot be cut so:", problems, remedy))


def lacks_leaves(lacking: Sequence[tuple[str, int]], stages: Mapping[str, Sequence[int]]) -> PlanError:
    """Code between units that reads leaves which its stage does not hold."""
    rows = [f"{path} is read on stage {stage}, and held by {_held(stages[path])}" for path, stage in lacking]
    some = lacking[0][0]
    wanted = tuple(sorted({*stages[some], lacking[0][1]}))
    remedy = f"Let these stages hold it: fs.Stages(axis, leaves=[({some!r}, {wanted})]), or read it in a unit."
    return PlanError(lines("stages: code outside of units reads leaves of other stages:", rows, remedy))


def scattered_leaves(call: str, stages: Mapping[str, Sequence[int]]) -> PlanError:
    """A unit whose leaves are on no common stage."""
    rows = [f"{path} is held by {_held(held)}" for path, held in stages.items()]
    remedy = (
        "Cut the model so that one stage has them all, or let leaves outside of units be on several stages: "
        'fs.Stages(axis, leaves=[("table.weight", (0, -1))]).'
    )
    return PlanError(lines(f"stages: no stage holds all leaves that unit {call} reads:", rows, remedy))


def other_shapes(number: int) -> PlanError:
    """Microbatches of unequal shapes."""
    return PlanError(
        f"stages: microbatch {number} has other shapes than the first one, and messages between stages have one size: "
        f"pad the microbatches, or give a batch whose rows divide by accumulate="
    )


def unheard(rank: int, op: str, other: int, problem: str) -> ScheduleError:
    """Schedules of ranks that do not fit together."""
    return ScheduleError(
        f"the schedules of a pipeline do not fit together: '{op}' at position {rank} of the stage axis {problem} at "
        f"position {other}"
    )


def _held(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
