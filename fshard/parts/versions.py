"""The versions of parameters that the passes of a step function read: those of states, and those that it makes."""

from collections.abc import Sequence
from dataclasses import dataclass

from fshard.parts.step_values import RunningFlat, StateParams
from fshard.sharding.plan import Plan
from fshard.state.flat import FlatForm, same_layout


@dataclass(frozen=True, eq=False)
class Version:
    """Parameters that passes of a step read.

    Attributes:
        flat: the parameters.
        plan: the plan as they are read.
        given: the number of the state that they are of, if the step was given them.
        at: the parameters without tangents.
        base: an earlier version of these, whose gathered groups serve this one, too.
    """

    flat: RunningFlat
    plan: Plan
    given: int | None
    at: RunningFlat
    base: int | None = None


def base_of(versions: Sequence[Version], at: RunningFlat) -> int | None:
    """The first version that has these parameters, with tangents or without."""
    state = at.state if isinstance(at, StateParams) else None
    for number, known in enumerate(versions):
        if known.at is at or (state is not None and isinstance(known.at, StateParams) and known.at.state == state):
            return number
    return None


def same_leaves(form: FlatForm, plan: Plan) -> bool:
    """Tell whether trees of a form are trees of all leaves of a plan, with its layout."""
    if form.plan is plan:
        return True
    return form.plan.mesh is plan.mesh and form.order.paths == tuple(plan.leaves) and same_layout(form.plan, plan)
