"""The arguments of a restore, checked and sorted by state."""

from collections.abc import Mapping
from typing import Any

from fshard.arguments import Want, expect, kind
from fshard.checkpoint.restore import RestoreRequest, TakeRules
from fshard.checkpoint.states import beside, by_name
from fshard.errors import PlanError
from fshard.sharding.plan import Plan
from fshard.state.train_state import TrainState


def requests_of(
    plan: Any, opt: Any, step: int | None, cast: bool, rules: TakeRules | None, into: Any
) -> dict[str, RestoreRequest]:
    """The arguments of a restore for each state, checked."""
    call = "restore(plan, opt)"
    if not isinstance(plan, Plan | Mapping):
        raise PlanError(f"{call} takes a plan, and was given {kind(plan)}")
    plans = by_name(plan, Plan, call)
    opts, kept = beside(opt, plans, call, "opt"), beside(into, plans, call, "into")
    wants: list[Want] = [
        ("step", step, (int, type(None)), "an int, or None for the newest"),
        ("rules", rules, (list, tuple, type(None)), "a list of (pattern, name in the checkpoint or None)"),
        *(("into", one, (TrainState, type(None)), "a train state") for one in kept.values()),
    ]
    expect(call, wants)
    for name, one in kept.items():
        if one is not None:
            one.check_plan(plans[name])
    return {name: RestoreRequest(plans[name], opts[name], cast, rules, kept[name]) for name in plans}
