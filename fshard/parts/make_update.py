"""``fs.make_update``: the other part of a step, as a user asks for it."""

from collections.abc import Callable, Sequence

from fshard.arguments import Want, described, expect
from fshard.errors import PlanError
from fshard.hints import teaching
from fshard.optim.base import Optimizer
from fshard.optim.checks import is_optimizer, optimizer_meant
from fshard.optim.scaling import LossScale
from fshard.parts.update_metrics import UpdateMetrics
from fshard.parts.update_part import UpdateStep
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.steps.clip import read_clip
from fshard.runtime.steps.norm_sets import read_norms
from fshard.runtime.steps.step_options import SKIPS, UpdateOptions, late_problems
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages


@teaching
@made_on_each_rank(batches=False)
def make_update(
    opt: Optimizer,
    plan: Plan,
    *,
    clip_norm: float | Sequence[tuple[str, float | None]] | None = None,
    skip_norm: float | None = None,
    skip_limit: int = SKIPS,
    skip: Callable[[UpdateMetrics], bool] | None = None,
    norms: str | Sequence[str] | None = None,
    only: str | None = None,
    loss_scale: LossScale | None = None,
    donate: bool = True,
) -> UpdateStep:
    """Make the function that updates: ``update(state, grads) -> (state, metrics)`` (``optax.apply_updates``).

    The update is that of a train step: fused over leaves, with exact clipping, and applied group by group behind the
    next forward. In a function that ``fs.make_step`` runs it is a part of that step.

    Args:
        opt: the optimizer of the state.
        plan: the plan.
        clip_norm: as for ``fs.make_train_step``; norms are those of the leaves that it updates.
        skip_norm: update nothing where that norm is larger; ``metrics.skipped`` says so.
        skip_limit: updates in a row that ``skip_norm=`` and ``skip=`` also skip because the loss or the gradient is
            not finite; the next one is an error.
        skip: update nothing where this function says so of the metrics, once all that they hold is known. All ranks
            must say the same.
        norms: which gradient norms ``metrics.grad_norms`` has besides those of the rules of ``clip_norm``:
            ``"groups"``, or patterns on paths; as for ``fs.make_train_step``.
        only: a regular expression for whole paths: these leaves are updated. The others keep their values, their
            optimizer state and their number of updates.
        loss_scale: that of ``fs.value_and_grad(loss_scale=)``. Where the gradient norm is not finite nothing is
            updated, ``metrics.skipped`` says so, and the state that comes back has a smaller scale.
        donate: reuse the memory of the state and of the gradients.

    With ``fs.optim.every(k, opt)`` a call adds the gradients to those that the state carries, and each k-th call
    updates with their mean: of the k gradients, however many elements each was a mean of.

    Raises:
        PlanError: an invalid option; an optimizer that does not fit the plan.

    >>> params = {"w": torch.ones(3), "b": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> update = fs.make_update(opt, plan, only="w")
    >>> state, metrics = update(fs.init_state(plan, opt, params=params), {"w": torch.ones(3)})
    >>> state.params, metrics.grad_norm
    ({'w': tensor([0.5000, 0.5000, 0.5000]), 'b': tensor([1., 1., 1.])}, tensor(1.7321))
    """
    if not isinstance(plan, Plan) or not is_optimizer(opt):
        raise PlanError(
            f"make_update(opt, plan) takes an optimizer of fs.optim and a plan, and was given "
            f"{described(opt)} and {described(plan)}{optimizer_meant(opt)}"
        )
    wants: list[Want] = [
        ("only", only, (str, type(None)), "a regular expression for paths, or None"),
        ("loss_scale", loss_scale, (LossScale, type(None)), "fs.LossScale(...) or None"),
        ("donate", donate, bool, "True or False"),
    ]
    expect("make_update(opt, plan)", wants)
    refuse_stages("make_update(opt, plan)", plan)
    if problems := [*late_problems(opt, Policy(), skip_norm, skip, skip_limit)]:
        raise PlanError("; ".join(problems))
    chosen = plan if only is None else plan.only(only)
    clip, asked = read_clip(clip_norm, chosen), read_norms(norms, chosen)
    options = UpdateOptions(clip, skip_norm, skip, skip_limit, loss_scale, asked, donate)
    return UpdateStep(opt, plan, options, only)
