"""``fs.make_step``: a function of parts becomes one step, on one schedule."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from fshard.arguments import Want, described, expect
from fshard.collectives.scope import bind
from fshard.errors import PlanError, TreeError
from fshard.hints import teaching
from fshard.parts.piecewise import piecewise
from fshard.parts.record import Untraced
from fshard.parts.step_arguments import arguments
from fshard.parts.step_runner import StepRunner
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.comm import collective_call
from fshard.runtime.execution import Shield
from fshard.runtime.steps import refuse_transforms
from fshard.runtime.steps.step_options import RunOptions, read_running
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.schedule.step_trace import Trace
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.train_state import not_copied
from fshard.training.latest import LatestRun


class Step(LatestRun):
    """``step(state, batch) -> (state, metrics)``. Made by ``fs.make_step``.

    A step is atomic: if it raises, on this rank or on another, every state that it was given is as it was before, bit
    for bit, and can be used again.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> state = fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> grad, update = fs.value_and_grad(lambda params, x: (params["w"] * x).sum(), plan), fs.make_update(opt, plan)
    >>> def sign_descent(state, batch):
    ...     loss, grads = grad(state, batch)
    ...     state, _ = update(state, fs.tree.map(torch.sign, grads))
    ...     return state, {"loss": loss}
    >>> step = fs.make_step(sign_descent, plan)
    >>> state, metrics = step(state, torch.tensor([3.0, -4.0]))
    >>> step, metrics, state.params["w"]
    (<step of sign_descent>, {'loss': tensor(-1.)}, tensor([0.5000, 1.5000]))
    """

    _runner: StepRunner

    def __init__(self, fn: Callable[..., Any], plan: Plan, running: RunOptions, donate: bool) -> None:
        self.plan = plan
        self._runner = StepRunner(fn, plan, running, donate)
        self._late: BaseException | None = None  # a signal that came when the step before was made
        self._told = False

    def __repr__(self) -> str:
        return f"<step of {getattr(self._runner.fn, '__name__', 'a function')}>"

    __reduce__ = not_copied

    @collective_call
    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Make one step.

        Args:
            state: the state, or any pytree of states, that the function returns updated; donated unless the step was
                made with ``donate=False``.
            batch: this rank's part of the global batch: any pytree. States in it are only read.

        Returns:
            What the function returned: the states, and the metrics. Losses, auxiliary means and norms in these are
            0-dim tensors, equal on all ranks. Plain floats (Python's, and 0-dim floating tensors) and ``fs.Mean`` are
            their means over ranks; whole numbers, strings and None are equal on all ranks.

        Raises:
            DonatedError, TreeError: a state was donated to an earlier step, or is not a state.
            BatchError, LossError, UnitError: the batch, the function or what it returns breaks a rule; alike on all
                ranks.
            NonFiniteError: the norm of gradients that update a state is not finite.
            ReplicationError: ranks differ in what must be equal.
            PeerError: another rank failed.
            CommError: a collective failed or timed out; the process group is lost.
            Exception: whatever the function raises.
        """
        refuse_transforms("a train step of parts")
        given = arguments(state, batch)
        if not given.own:
            raise TreeError(f"step(state, batch): {described(state)} holds no state; fs.init_state makes one")
        late, self._late = self._late, None
        result: Any = None
        try:
            with Shield(late) as shield, bind(self.plan.mesh, self.plan.data_axes):
                result = self._runner.run(given, shield)
            self._late = shield.late
            if isinstance(result, str):
                if result:
                    self._tell(result)
                with bind(self.plan.mesh, self.plan.data_axes):
                    result = piecewise(self._runner.fn, self.plan, given, self._runner.donate)
            made: tuple[Any, Any] = result
            return made
        except BaseException:
            result = None  # a traceback that is kept must not hold the next state, which nobody else has
            raise

    def _tell(self, why: str) -> None:
        """Say once that the parts run one by one."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"the parts of {self!r} run one by one, since {why}. Each has a handshake and consensus of "
                f"its own, and the function may run more often than it is called, so it cannot count calls: decide "
                f"by torch.where, by state.step, or outside of the step",
                stacklevel=4,
            )

    @property
    def busy(self) -> Sequence[float]:
        """By rank, the seconds since the step before in which it did not wait for others, as ``metrics.ran.busy``.

        Equal on all ranks; the one with the most is the one that others wait for. Empty on one rank, and before a step
        has run on its schedule.
        """
        return self._runner.busy

    @property
    def units(self) -> str:
        """The graph that each unit of each pass runs as, and the units that share it; or why the unit runs as it is.

        Where parts run one by one, each part says it of itself: ``grad.units``.
        """
        told: list[str] = []
        passes = [programs for replay in self._runner.replays.values() for programs in replay.step.programs]
        for number, programs in enumerate(passes):
            text = "every unit runs as it is: compile=None" if programs.cache is None else programs.cache.text()
            told += [f"pass {number}", *[f"  {line}" for line in text.splitlines()]]
        return "\n".join(told) or "no units yet: the step has not run on a schedule"

    def trace(self, state: Any, batch: Any) -> Trace:
        """Trace the step for such states and batches, without running it. Needs no processes: any mesh will do.

        Raises:
            PlanError: the function depends on values of tensors, so that it has no schedule.
        """
        recorded = self._runner.recorded(arguments(state, batch))
        if isinstance(recorded, Untraced):
            raise PlanError(f"no schedule: {self!r} runs part by part, since {recorded.why}")
        if not recorded.passes:
            raise PlanError(f"no schedule: the function of {self!r} has no passes")
        return self._runner.trace(recorded)


@teaching
@made_on_each_rank(batches=True)
def make_step(
    fn: Callable[..., Any],
    plan: Plan,
    *,
    schedule: Policy | Auto | str | None = None,
    donate: bool = True,
    debug: bool = False,
) -> Step:
    """Make a step of a function of parts: ``step(state, batch) -> (state, metrics)``.

    The function composes ``fs.value_and_grad``, ``fs.make_update``, evaluation steps, products of ``fs.func`` and
    arithmetic on trees of shards as it likes: several losses, several gradients, perturbed parameters, several
    updates. It is run once on fake tensors. Then all its passes, gathers, reductions and updates are one schedule,
    which is checked and can be printed, with one handshake and one consensus: if anything fails on any rank, every
    state is as it was.

    Args:
        fn: ``fn(state, batch)``, which returns ``(state, metrics)``. It calls its parts outside of transforms, in the
            same order on all ranks.
        plan: a plan on the mesh; its data axes are those of the batch.
        schedule: as for ``fs.make_train_step``, for all passes.
        donate: reuse the memory of the states that the step takes.
        debug: as for ``fs.make_train_step``.

    Raises:
        PlanError: an invalid option.

    >>> params = {"w": torch.ones(3)}
    >>> plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> grad = fs.value_and_grad(lambda params, x: (params["w"] * x).sum(), plan)
    >>> update = fs.make_update(opt, plan)
    >>> def fn(state, batch):
    ...     loss, grads = grad(state, batch)
    ...     state, metrics = update(state, grads)
    ...     return state, {"loss": loss, "norm": metrics.grad_norm}
    >>> step = fs.make_step(fn, plan)
    >>> state, metrics = step(fs.init_state(plan, opt, params=params), torch.ones(3))
    >>> state.params["w"], metrics["loss"]
    (tensor([0.5000, 0.5000, 0.5000]), tensor(3.))
    """
    wants: list[Want] = [
        ("fn", fn, Callable, "a function of (state, batch)"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
        ("donate", donate, bool, "True or False"),
    ]
    expect("make_step(fn, plan)", wants)
    refuse_stages("make_step(fn, plan)", plan)
    running = read_running(schedule, debug)
    if isinstance(running.policy, Policy) and running.policy.secondary:
        raise PlanError(
            "schedule=Policy(reshard=fs.secondary(...)): a step of parts gathers several versions of parameters, and "
            "keeps no secondary shards of them; give reshard=True, False or fs.keep(...)"
        )
    return Step(fn, plan, running, donate)
