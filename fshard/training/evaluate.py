"""The eval step: forward only, on a schedule of its own, so that nothing of it can leak into training."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from fshard.arguments import Want, expect
from fshard.collectives.scope import bind
from fshard.errors import PlanError
from fshard.model.precision import Precision
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.comm import collective_call
from fshard.runtime.engine.buckets import Buckets, bucket_problems
from fshard.runtime.execution import Shards, Shield, held_back
from fshard.runtime.steps import PassSpec, Programs, Runner, StepRequest, make_programs, refuse_transforms
from fshard.runtime.steps.step_options import RunOptions, read_running
from fshard.schedule.auto import Auto
from fshard.schedule.policy import Policy
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.settle import complete
from fshard.state.train_state import TrainState, expect_state, not_copied
from fshard.training.latest import OneFunction
from fshard.training.metrics import global_result
from fshard.training.padding_check import PaddingCheck, numbers_of, padding_of, without_draws


class EvalStep(OneFunction):
    """``evaluate(state, batch) -> result``. Made by ``fs.make_eval_step``.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> state = fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> evaluate = fs.make_eval_step(lambda params, x: {"mean": (params["w"] * x).mean()}, plan)
    >>> evaluate, evaluate(state, torch.tensor([1.0, 3.0]))
    (<eval step of 1 leaves in 1 groups>, {'mean': tensor(2.)})
    """

    def __init__(self, fn: Callable[..., Any], plan: Plan, running: RunOptions, precision: Precision | None) -> None:
        self.plan, self.running = plan, running
        read = self._read = plan if precision is None else plan.read_in(precision)
        self.spec = PassSpec(fn, read, self._programs, train=False)
        self._runner = Runner(fn, self._programs(), "evaluation step")
        self._equal = Equal(read, running.told(), always=running.debug)

    def _programs(self, debug: bool = False) -> Programs:
        return make_programs(self._read, self.running.debugged(debug), train=False)

    @functools.cached_property
    def _padding(self) -> PaddingCheck | None:
        return padding_of(self.running.buckets, self._runner)

    def __repr__(self) -> str:
        return f"<eval step of {len(self.plan.leaves)} leaves in {len(self.plan.groups)} groups>"

    __reduce__ = not_copied

    @collective_call
    def __call__(self, state: TrainState, batch: Any) -> Any:
        """Evaluate on a batch. Neither the state nor a train step that uses it changes.

        Args:
            state: the state; it is settled first, see ``fs.settle``.
            batch: this rank's part of the global batch.

        Returns:
            What the function returned, with plain floats (Python's, and 0-dim floating tensors) and ``fs.Mean``
            replaced by their global means. Whole numbers, strings and None are equal on all ranks. Other leaves are
            this rank's own.

        Raises:
            DonatedError, TreeError: the state was donated to a step, or made for another plan.
            BatchError: plain floats that differ, over batches of different sizes; return ``fs.Mean``.
            LossError: whole numbers, strings or None differ between ranks.
        """
        refuse_transforms("an eval step")
        expect_state(state, "evaluate")
        if (running := getattr(state.memory, "running", None)) is not None:  # a step function of which this is a part
            if self.running.buckets is not None:
                raise PlanError(
                    "an evaluation with buckets= is called in a step function, whose batch it cannot pad: pad what the "
                    "step is given, step(state, buckets.pad(batch)), and make the evaluation without buckets="
                )
            return running.evaluate(self, state, batch)
        state.check_plan(self.plan)
        with held_back() as shield:
            facts = functools.partial(self._equal.of, state)
            shards = complete(state, self.plan.mesh).finished()
            if self._padding is not None:
                batch = self._padding.padded(batch, functools.partial(self._tried, shards, shield), facts)
            result = self._evaluate(StepRequest(batch, shards, shield, facts=facts))
            state.memory.note_compared()
        return result

    def _tried(self, shards: Shards, shield: Shield, batch: Any) -> list[float]:
        """The numbers that the function returns of a batch, without random numbers."""
        return numbers_of(
            self._evaluate(StepRequest(batch, shards, shield, randomness=functools.partial(without_draws, nullcontext)))
        )

    def _evaluate(self, request: StepRequest) -> Any:
        # Slots are made once, and must be ordinary tensors.
        with torch.inference_mode(False), bind(self.plan.mesh, self.plan.data_axes):
            outcome = self._runner.run(request)
        return global_result(outcome.measured.aux[0], outcome.verdict.means, outcome.verdict.floats)


@made_on_each_rank(batches=True)
def make_eval_step(
    fn: Callable[..., Any],
    plan: Plan,
    *,
    schedule: Policy | Auto | str | None = None,
    debug: bool = False,
    compile: str | None = None,
    precision: Precision | None = None,
    buckets: Buckets | None = None,
) -> EvalStep:
    """Make a function that evaluates sharded parameters: ``evaluate(state, batch) -> result``.

    Args:
        fn: ``fn(params, batch)``; it may return any pytree, and is run without gradients.
        plan: the plan.
        schedule: as for ``fs.make_train_step``: prefetch depth and reshard after forward, or what chooses them.
        debug: fill every freed range with nan, and compare copies of leaves before every evaluation.
        compile: as for ``fs.make_train_step``.
        precision: in which dtypes to evaluate, instead of those of the plan and its rules: with ``fs.Precision()``
            units read all parameters as they are kept.
        buckets: as for ``fs.make_train_step``; numbers in what the function returns must not depend on the padding,
            and tensors of single positions have the padded size.

    Raises:
        PlanError: an invalid option.

    >>> mesh, w = fs.make_mesh((1,), ("data",)), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))])
    >>> state = fs.init_state(plan, fs.optim.sgd(0.1), params={"w": w})
    >>> evaluate = fs.make_eval_step(lambda params, batch: {"mean": (batch @ params["w"]).mean()}, plan)
    >>> evaluate(state, torch.ones(1, 2))
    {'mean': tensor(5.)}
    """
    wants: list[Want] = [
        ("fn", fn, Callable, "a function of (params, batch)"),
        ("plan", plan, Plan, "what fs.make_plan returned"),
        ("precision", precision, (Precision, type(None)), "fs.Precision(...) or None"),
    ]
    expect("make_eval_step(fn, plan)", wants)
    running, plan = read_running(schedule, debug, compile, buckets=buckets), plan.whole or plan
    if problems := bucket_problems(buckets, plan):
        raise PlanError("; ".join(problems))
    if plan.stages is not None and plan.source is not None and plan.source.stages is not None:
        made: EvalStep = plan.source.stages.eval_step(fn, plan, running, precision)
        return made
    return EvalStep(fn, plan, running, precision)
