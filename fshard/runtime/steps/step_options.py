"""The options of a train step, and which values and combinations of them are invalid."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard.arguments import described
from fshard.errors import PlanError
from fshard.model.split import Model
from fshard.optim import checks
from fshard.optim.base import Optimizer
from fshard.optim.checks import is_optimizer, optimizer_meant
from fshard.optim.contract import contract
from fshard.optim.scaling import LossScale
from fshard.runtime.comm.device_streams import ComputeOrder
from fshard.runtime.engine.buckets import Buckets
from fshard.runtime.engine.remat_rules import NO_REMAT, Remat, read_remat
from fshard.runtime.steps.backends import check_backend
from fshard.runtime.steps.clip import Clip
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan


@dataclass(frozen=True)
class RunOptions:
    """Options of runs: what train and evaluation steps, gradients and steps of parts are asked alike."""

    policy: Policy | Auto
    debug: bool
    compile: str | None = None
    remat: Remat = NO_REMAT
    buckets: Buckets | None = None

    @property
    def graph(self) -> bool:
        """Tell whether steps are captured and replayed."""
        return isinstance(self.policy, Policy) and self.policy.graph != "none"

    def debugged(self, debug: bool) -> "RunOptions":
        """The same, in debug mode also where this says so."""
        return replace(self, debug=self.debug or debug)

    def told(self) -> dict[str, Any]:
        """Return what must be equal on all ranks."""
        told = {"schedule": self.policy, "remat": self.remat.rules, "debug": self.debug, "compile": self.compile}
        return told if self.buckets is None else told | {"buckets": self.buckets}


def read_running(
    schedule: Any,
    debug: Any,
    compile: str | None = None,
    remat: Any = None,
    *,
    updates: bool = False,
    buckets: Buckets | None = None,
) -> RunOptions:
    """The options of running, as a user gives them.

    Args:
        schedule: a policy, what chooses one, ``"auto"``, or None for the default policy.
        debug: True or False.
        compile: the backend.
        remat: what ``read_remat`` reads.
        updates: whether there are updates, which may happen in the backward.
        buckets: the sizes to which batches are padded; None for none.

    Raises:
        PlanError: an invalid option.
    """
    check_backend(compile)
    policy = Policy() if schedule is None else Auto() if schedule == "auto" else schedule
    if not isinstance(policy, Policy | Auto):
        raise PlanError(f"schedule={schedule!r} must be fs.Policy(...), 'auto' or fs.Auto(...)")
    if problems := [*flag_problems(debug=debug)]:
        raise PlanError("; ".join(problems))
    if not updates and policy.update != "deferred":
        raise PlanError(f"schedule={schedule!r}: only fs.make_train_step can have update={policy.update!r}")
    if not updates and isinstance(policy, Policy) and policy.graph != "none":
        raise PlanError(f"schedule={schedule!r}: only fs.make_train_step captures graphs")
    return RunOptions(policy, debug, compile, read_remat(remat), buckets)


SKIPS = 10
"""Updates in a row that are skipped since they are not finite, where ``skip_norm=`` or ``skip=`` is given."""


@dataclass(frozen=True)
class UpdateOptions:
    """Options of updates: of ``make_update``, and of train steps."""

    clip: Clip
    skip_norm: float | None
    skip: Callable[[Any], bool] | None
    skip_limit: int
    loss_scale: LossScale | None
    norms: tuple[str, ...] | None
    donate: bool

    def told(self) -> dict[str, Any]:
        """The options that must be equal on all ranks. Those about a rank's own memory need not be."""
        name = None if self.skip is None else getattr(self.skip, "__qualname__", type(self.skip).__qualname__)
        kept = {each: getattr(self, each) for each in ("skip_norm", "skip_limit", "loss_scale", "norms")}
        return {"clip_norm": self.clip.rules, "skip": name} | kept


@dataclass(frozen=True)
class Options(UpdateOptions):
    """Options of ``make_train_step``."""

    accumulate: int
    running: RunOptions

    def told(self) -> dict[str, Any]:
        """Those of updates, and how the step runs."""
        return self.running.told() | super().told() | {"accumulate": self.accumulate}


def expect_optimizer(call: str, opt: Any, plan: Any) -> None:
    """Refuse what is no optimizer, or no plan.

    Raises:
        PlanError: naming both.
    """
    if not isinstance(plan, Plan) or not is_optimizer(opt):
        raise PlanError(
            f"{call} takes an optimizer of fs.optim and a plan, and was given {described(opt)} and {described(plan)}"
            f"{optimizer_meant(opt)}"
        )


def step_problems(loss_fn: Any, plan: Plan, clip: Clip, accumulate: Any, policy: Policy | Auto) -> Iterator[str]:
    """Return what is invalid among the options of a train step, alone or together."""
    if clip.clips and policy.update == "in_backward":
        yield "clip_norm= needs the norm of the whole gradient, which update='in_backward' never has"
    if not isinstance(accumulate, int) or accumulate < 1:
        yield f"accumulate={accumulate!r} must be an int >= 1"
    if not callable(loss_fn) or isinstance(loss_fn, torch.nn.Module | Model):
        yield f"loss_fn is {type(loss_fn).__name__}, not a function (params, batch) that calls model.apply(params, ...)"
    full = isinstance(policy, Policy) and policy.accumulation == "full"
    if full and accumulate != 1 and any(g.reduce_dtype != g.dtype for g in plan.groups):
        yield (
            "accumulation='full' adds up whole gradients in the dtype that travels, and Precision(reduce=) rounds that "
            "at every microbatch: use accumulation='sharded'"
        )


def beside_problems(plan: Plan, policy: Policy | Auto) -> Iterator[str]:
    """Say why updates cannot run beside compute."""
    if policy.update != "beside":
        return
    asked, remedy = "update='beside'", "use update='deferred', whose bits are the same"
    if plan.mesh.device.type not in ComputeOrder.kinds:
        yield f"{asked} needs the streams of a GPU, and the mesh is on device {str(plan.mesh.device)!r}: {remedy}"
    if plan.stages is not None:
        yield f"{asked} is not for stages of a pipeline: {remedy}"
    for group in plan.groups:
        if group.trainable and (group.offloaded or group.kinds.hosted or group.kinds.opt != "device"):
            path = group.leaves[0].path
            yield f"{asked}: {path} or its optimizer state is in memory of the host, or updated there: {remedy}"
            return


def feedback_problems(plan: Plan, policy: Policy | Auto) -> Iterator[str]:
    """Say why a step cannot keep what rounding leaves out of gradients."""
    kept = [group for group in plan.groups if group.feedback]
    if kept and policy.update == "in_backward":
        yield (
            f"fs.Wire(feedback=) keeps what rounding leaves out of the gradient of {kept[0].leaves[0].path} once all "
            f"ranks know that the step has happened, and update='in_backward' has updated by then"
        )


def refuse_feedback(plan: Plan, what: str) -> None:
    """Refuse a plan whose gradients leave something for the next step.

    Raises:
        PlanError: naming a leaf, and the way out.
    """
    kept = [leaf.path for group in plan.groups if group.feedback for leaf in group.leaves]
    if kept:
        raise PlanError(
            f"{what}: the plan's fs.Wire(feedback=) keeps what rounding leaves out of gradients, such as that of "
            f"{kept[0]}, in the state, and gradients between the parts of a step belong to no state: use "
            f"fs.make_train_step, or plan.replace(wire=...) without feedback="
        )


def flag_problems(**flags: Any) -> Iterator[str]:
    """Say which flags are neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            yield f"{name}={value!r} must be True or False"


def late_problems(
    opt: Optimizer, policy: Policy | Auto, skip_norm: Any, skip: Any, skip_limit: Any = SKIPS
) -> Iterator[str]:
    """Return what is invalid among the options that decide after the backward whether to update."""
    if type(skip_limit) is not int or skip_limit < 0:
        yield f"skip_limit={skip_limit!r} must be an int >= 0"
    if skip_norm is not None:
        yield from checks.number("skip_norm", skip_norm, "(0, inf)")
    if skip is not None and not callable(skip):
        yield f"skip={skip!r} must be a function of the step's metrics, or None"
    if policy.update == "in_backward" and (
        skip_norm is not None or skip is not None or contract(opt).steps is not None
    ):
        yield "skip_norm=, skip= and fs.optim.every decide when the gradient is whole: not with update='in_backward'"


def norm_problems(norms: Any, policy: Policy | Auto) -> Iterator[str]:
    """Say why a step cannot tell these norms."""
    if policy.update == "in_backward" and norms not in (None, "groups"):
        yield "norms= by pattern needs the gradient at the end of the step, which update='in_backward' never has whole"
