"""Refusals of programs that cannot be cut into the stages of a plan: one message builder per failure."""

import re
import warnings
from collections.abc import Mapping, Sequence

from fshard.errors import PlanError, ScheduleError, UnitError, lines

SHOWN = 8
"""The most leaves that a remedy names."""


def depends_on_values() -> PlanError:
    """A program that no trace can follow."""
    return PlanError(
        "stages: the program depends on values of tensors (.item(), a mask, if loss > 1), and a pipeline must know its "
        "units and what goes between ranks before it runs: choose by torch.where, or make the plan without stages="
    )


def differentiates_units(units: Sequence[str]) -> PlanError:
    """A loss that takes derivatives of units."""
    return PlanError(
        f"stages: the loss function differentiates {', '.join(units)} itself, which other ranks may hold: take such "
        f"derivatives inside of a unit, or make the plan without stages="
    )


def offloads() -> PlanError:
    """Activations on the host in a pipeline."""
    return PlanError(
        "stages: remat='offload' moves activations around the forward and the backward of one microbatch, and those of "
        "a pipeline take turns: give remat='all' or a policy that computes again, or make the plan without stages="
    )


def bad_cut(problems: Sequence[str]) -> PlanError:
    """Calls of units that do not go from stage to stage in order."""
    remedy = (
        "Units are cut in the order of their leaves in the tree, so let the tree have them in the order of their calls "
        "(a dict keeps its order), and let each stage have a unit that is called: fs.Stages(axis, cut=(2, 3))."
    )
    return PlanError(lines("stages: the program cannot be cut so:", problems, remedy))


def lacks_leaves(
    lacking: Sequence[tuple[str, int]], stages: Mapping[str, Sequence[int]], outside: Sequence[Sequence[str]]
) -> PlanError:
    """Code between units that reads leaves which its stage does not hold; ``outside`` has what each stage reads."""
    rows = [f"{path} is read on stage {stage}, and held by {_held(stages[path])}" for path, stage in lacking]
    pairs = []
    for path in dict.fromkeys(path for path, _ in lacking):
        readers = [stage for stage, paths in enumerate(outside) if path in paths]
        pairs.append(f"({re.escape(path)!r}, {readers[0] if len(readers) == 1 else tuple(readers)})")
    more = ["..."] if len(pairs) > SHOWN else []
    remedy = (
        f"Let the stages that read them hold them: fs.Stages(axis, leaves=[{', '.join(pairs[:SHOWN] + more)}]), or "
        f"read them in units. Leaves of units are where their units are."
    )
    return PlanError(lines("stages: code outside of units reads leaves of other stages:", rows, remedy))


def beside_results(calls: Sequence[str]) -> PlanError:
    """Units whose values reach other code in other ways than by their results."""
    remedy = (
        "Return them from the unit. Models of transformers collect hidden states, attentions and logits of routers so: "
        "output_router_logits=False, output_hidden_states=False."
    )
    head = "stages: code of other stages reads values that hooks, lists or globals have from inside of these units:"
    return PlanError(lines(head, calls[:SHOWN], remedy))


def changes_values(unit: str) -> PlanError:
    """A unit that counts in what it was given, or in its closure."""
    return PlanError(
        f"stages: unit {unit} changes a number or text in its arguments or its closure, which ranks of other stages "
        f"would not see, since they do not run it: return the new value from the unit, and pass it to the next"
    )


def scattered_leaves(call: str, stages: Mapping[str, Sequence[int]]) -> PlanError:
    """A unit whose leaves are on no common stage."""
    rows = [f"{path} is held by {_held(held)}" for path, held in stages.items()]
    remedy = (
        "Cut the model so that one stage has them all, or let leaves outside of units be on several stages: "
        'fs.Stages(axis, leaves=[("table.weight", (0, -1))]).'
    )
    return PlanError(lines(f"stages: no stage holds all leaves that unit {call} reads:", rows, remedy))


def writes_shared(outputs: Sequence[tuple[str, int]]) -> PlanError:
    """Code between units that writes to views or to results which share memory, of which other stages get copies."""
    rows = [f"output {number} of unit {call}" for call, number in outputs]
    remedy = "Write out of place (x = x + y, not x += y), or let the unit return a copy (.clone())."
    return PlanError(
        lines("stages: code between units writes in place to results that share memory, or are views:", rows, remedy)
    )


def idle_last_stage(calls: Sequence[str]) -> PlanError:
    """A last stage through none of whose units the loss has a gradient."""
    return PlanError(
        f"stages: no gradient goes through the units of the last stage, {', '.join(calls)}, and the backward begins "
        f"there: cut the model so that the last stage has a unit which the loss depends on: fs.Stages(axis, cut=(2, 3))"
    )


def left_its_schedule(reason: object) -> ScheduleError:
    """A program that makes other calls than its trace."""
    return ScheduleError(
        f"stages: the program made other calls of units than in its trace: {reason}. A pipeline cannot follow it: let "
        f"Python values that decide which units run be part of the batch, or make the plan without stages="
    )


def other_shapes(number: int, given: str, first: str) -> PlanError:
    """Microbatches of unequal shapes or dtypes."""
    return PlanError(
        f"stages: microbatch {number} has other shapes than the first one, and messages between stages have one size: "
        f"it is {given}, the first one {first}: pad the microbatches, or give a batch whose rows divide by accumulate="
    )


def warn_of_programs(count: int) -> None:
    """Warn of microbatches of many shapes."""
    warnings.warn(
        f"stages: microbatches had {count} different shapes or Python values, and each was traced anew: "
        f"pad them to a few lengths, with buckets=fs.Buckets({{...}}) of fs.make_train_step",
        stacklevel=3,
    )


def other_message(name: str, microbatch: int, given: str, traced: str) -> UnitError:
    """A unit whose output is not what it was in the trace."""
    return UnitError(
        f"stages: what goes over the edge {name} is {given} in microbatch {microbatch}, and was {traced} when the "
        f"program was traced: let the shape and the dtype of what units return follow from the batch alone"
    )


def unheard(rank: int, op: str, other: int, problem: str) -> ScheduleError:
    """Schedules of ranks that do not fit together."""
    return ScheduleError(
        f"the schedules of a pipeline do not fit together: '{op}' at position {rank} of the stage axis {problem} at "
        f"position {other}"
    )


def _held(stages: Sequence[int]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
