"""Making a train step: reading and checking its options."""

from collections.abc import Callable, Sequence
from typing import Any

from fshard.arguments import described
from fshard.errors import PlanError
from fshard.hints import teaching
from fshard.optim.base import Optimizer
from fshard.optim.checks import is_optimizer, optimizer_meant
from fshard.optim.contract import contract
from fshard.optim.scaling import LossScale
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.engine.buckets import Buckets, bucket_problems
from fshard.runtime.steps import Options
from fshard.runtime.steps.clip import read_clip
from fshard.runtime.steps.float16 import scale_problems, warn_of_float16
from fshard.runtime.steps.norm_sets import read_norms
from fshard.runtime.steps.step_options import (
    SKIPS,
    beside_problems,
    feedback_problems,
    flag_problems,
    late_problems,
    norm_problems,
    read_running,
    step_problems,
)
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.fit import check_optimizer
from fshard.training.metrics import Metrics
from fshard.training.train_step import TrainStep, programs_of


@teaching
@made_on_each_rank(batches=True)
def make_train_step(
    loss_fn: Callable[..., Any],
    opt: Optimizer,
    plan: Plan,
    *,
    clip_norm: float | Sequence[tuple[str, float | None]] | None = None,
    skip_norm: float | None = None,
    skip: Callable[[Metrics], bool] | None = None,
    skip_limit: int = SKIPS,
    accumulate: int = 1,
    schedule: Policy | Auto | str | None = None,
    donate: bool = True,
    debug: bool = False,
    compile: str | None = None,
    remat: Any = None,
    loss_scale: LossScale | None = None,
    norms: str | Sequence[str] | None = None,
    buckets: Buckets | None = None,
) -> TrainStep:
    """Make the function that trains: ``step(state, batch) -> (state, metrics)``.

    Args:
        loss_fn: ``loss_fn(params, batch)``, which returns a scalar tensor, an ``fs.Mean``, or either with a dict of
            auxiliary values. It is run once on fake tensors to find the order of its units.
        opt: an optimizer of ``fs.optim``.
        plan: the plan.
        clip_norm: clip the global norm of the gradient to this, exactly (``torch.nn.utils.clip_grad_norm_``). Rules
            ``[(pattern, limit), ...]`` on paths clip the leaves of each by their own norm; the first match wins.
        skip_norm: skip a step whose gradient norm is larger: the state that comes back is the one that went in.
        skip: skip a step of whose metrics this function says so. All ranks must say the same.
        skip_limit: steps in a row that ``skip_norm=`` and ``skip=`` also skip because the loss or the gradient is not
            finite; the next one is an error, as the first one is without these options, or with 0.
        accumulate: microbatches into which each batch is cut along dim 0; gradients are those of the whole batch. With
            an ``fs.Mean`` they may be of unequal size. ``fs.Microbatches`` gives them one by one.
        schedule: how the schedule is built: prefetch depth, reductions in flight, reshard after forward, and when
            updates happen. None stands for ``fs.Policy()``. ``"auto"``, or ``fs.Auto(memory=...)``, chooses by
            memory, by simulated time, and by what the first steps of a run take under a handful of policies;
            ``step.trace(batch).choice`` says what and why, and whether that is ``settled``.
        donate: reuse the memory of the state that a step takes.
        debug: fill every freed range with nan, so that a read of freed memory shows; compare copies of leaves and of
            optimizer state before every step; and the gradients of leaves that ranks along other than the data axes
            hold copies of, so that a missing ``pvary`` shows. An error about numbers that are not finite names the
            operator that first made one, but inside of compiled units.
        compile: None runs units as they are. ``"fx"`` traces each distinct unit once and runs the ops of its forward
            and its backward without the rest of the unit's Python and of autograd; every result keeps its bits.
            ``"inductor"`` compiles them with torch's compiler, which fuses ops and changes the last bits. Units that
            cannot be traced run as they are, and so do those whose graph differs from them at its first call, such as
            units with dropout inside of attention under Inductor on the CPU; ``step.units`` names them, and says why.
        remat: which units are computed again in their backward, so that less memory is held between the two: None, for
            none; ``"all"``; ``"offload"``, which computes nothing again, and moves what they keep to the host; a policy
            of ``fs.checkpoint_policies``, which says whose results are kept nevertheless; or rules ``[(glob, one of
            these)]`` on names of units, of which the first that matches counts; ``"**"`` matches all. Gradients keep
            their bits.
        loss_scale: how the loss is scaled for the backward, ``fs.LossScale()``, which float16 needs. A step whose
            gradient is not finite is skipped on all ranks: it returns the state as it was, with a smaller scale, and
            ``metrics.skipped``. A loss that is not finite stays an error, since no scale would mend it.
        norms: which gradient norms ``metrics.grad_norms`` has besides those of the rules of ``clip_norm``:
            ``"groups"`` for each group of the plan, or patterns on paths, of which the first that matches counts.
            They travel with the loss: no exchange and no read of the device more.
        buckets: pad one dim of each batch to one of few sizes, so that graphs of units and programs of pipelines are
            made for these alone: ``fs.Buckets({"tokens": 0, "labels": -100})``. The loss must ignore the padding.

    Raises:
        PlanError: an invalid option; ``compile="inductor"`` without a C++ compiler.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.1)
    >>> step = fs.make_train_step(lambda params, batch: (batch @ params["w"]).sum(), opt, plan)
    >>> state, metrics = step(fs.init_state(plan, opt, params={"w": w}), torch.ones(1, 2))
    >>> metrics.loss, state.step, state.params["w"]
    (tensor(10.), 1, tensor([0.9000, 1.9000, 2.9000, 3.9000]))
    """
    running = read_running(schedule, debug, compile, remat, updates=True, buckets=buckets)
    policy = running.policy
    if not isinstance(plan, Plan) or not is_optimizer(opt):
        raise PlanError(
            f"make_train_step(loss_fn, opt, plan) takes an optimizer of fs.optim and a plan, and was given "
            f"{described(opt)} and {described(plan)}{optimizer_meant(opt)}"
        )
    plan = plan.whole or plan
    clip = read_clip(clip_norm, plan)
    problems = [
        *flag_problems(donate=donate),
        *step_problems(loss_fn, plan, clip, accumulate, policy),
        *late_problems(opt, policy, skip_norm, skip, skip_limit),
        *feedback_problems(plan, policy),
        *beside_problems(plan, policy),
        *scale_problems(loss_scale, policy),
        *norm_problems(norms, policy),
        *bucket_problems(buckets, plan, policy.update == "in_backward"),
    ]
    if problems:
        raise PlanError("; ".join(problems))
    check_optimizer(plan, opt)
    asked = read_norms(norms, plan)
    options = Options(clip, skip_norm, skip, skip_limit, loss_scale, asked, donate, accumulate, running)
    warn_of_float16(plan, loss_scale)
    if isinstance(policy, Policy) and policy.graph != "none":
        return _captured(loss_fn, opt, plan, options, policy.graph)
    if plan.stages is not None and plan.source is not None and plan.source.stages is not None:
        made: TrainStep = plan.source.stages.train_step(loss_fn, opt, plan, options)
        return made
    return TrainStep(loss_fn, opt, plan, options)


def _captured(loss_fn: Callable[..., Any], opt: Optimizer, plan: Plan, options: Options, mode: str) -> TrainStep:
    """A train step that is captured as a graph, or as segments of one."""
    from fshard.runtime import whole_graph  # which other steps do not import

    capture = whole_graph.device_capture.capture_of(plan.mesh.device)
    problems = [*whole_graph.graph_problems(plan, opt, options, capture, mode)]
    if problems or capture is None:
        raise PlanError("; ".join(problems))
    programs = programs_of(plan, options, contract(opt))
    runner = whole_graph.GraphRunner(loss_fn, programs, len(options.clip.rules), capture, mode)
    return TrainStep(loss_fn, opt, plan, options, programs, runner)
