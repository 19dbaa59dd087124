"""``fs.recheck``: some steps are computed twice, and compared before their update: broken hardware shows."""

import socket
from collections.abc import Sequence
from typing import Any

import torch

from fshard.arguments import described
from fshard.errors import CorruptionError, PlanError, ShardError, lines
from fshard.played.everywhere import made_on_each_rank
from fshard.runtime.comm import collective_call, exchange, exchange_text, mesh_communicator
from fshard.runtime.comm.copies import bits
from fshard.runtime.comm.facts import digest
from fshard.runtime.execution.route import Observer
from fshard.runtime.memory.gradients import FlatGradients
from fshard.schedule.ops import Op
from fshard.schedule.policy import Policy
from fshard.schedule.transfers import started
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.state.train_state import TrainState
from fshard.training.metrics import Metrics

HOST_BYTES = 64
"""Bytes of a host's name that an error shows."""


class GradientPrints(Observer):
    """Notes a number for the bits of each gradient of this rank, before it is summed with those of others.

    Attributes:
        found: the op at which each was noted, and the number.
    """

    def __init__(self, plan: Plan) -> None:
        self.found: list[tuple[str, int]] = []
        self.gradients: FlatGradients | None = None
        self._groups = {group.name: group.id for group in plan.groups if group.trainable}
        self._first: dict[int, str] = {}  # the kind of the first transfer of each gradient

    def begin(self, at: int, op: Op) -> None:
        """Note a gradient whose path begins, or at the end of the step those that have none."""
        row, gradients = started(op.kind), self.gradients
        if gradients is None:
            return
        if op.kind == "consensus":
            for name, group in self._groups.items():
                if group not in self._first:
                    self.found.append((name, _print(gradients, group)))
        elif row is not None and row.stage == "gradient" and op.target in self._groups:
            group = self._groups[op.target]
            if self._first.setdefault(group, op.kind) == op.kind:
                self.found.append((op.target, _print(gradients, group)))


def _print(gradients: FlatGradients, group: int) -> int:
    """A number for the gradient of a group, as this rank has computed it."""
    held = gradients.full(group)
    return 0 if held is None else digest([(number, bits(grad)) for number, grad in held.items()])


class RecheckedStep:
    """``step(state, batch) -> (state, metrics)``. Made by ``fs.recheck``. Its attributes are those of the step.

    Args:
        step: the train step.
        every: of how many steps one is computed twice.
    """

    def __init__(self, step: Any, every: int) -> None:
        self.step, self.every = step, every

    def __getattr__(self, name: str) -> Any:
        if name in ("step", "every"):  # copying asks before there is one
            raise AttributeError(name)
        return getattr(self.step, name)

    def __repr__(self) -> str:
        return f"<{self.step!r}, every {self.every} steps computed twice>"

    @collective_call
    def __call__(self, state: TrainState, batch: Any, **options: Any) -> tuple[TrainState, Metrics]:
        """Make one step, as the step does.

        Raises:
            CorruptionError: a rank computed other gradients the second time; on all ranks alike. Nothing is updated.
            Exception: whatever the step raises.
        """
        if (state.step + 1) % self.every or self.step.latest.schedule is None or not self._traces(batch):
            return self._once(state, batch, options)
        first = self._printed(state, batch, options)[0]
        second, made = self._printed(state, batch, options)
        problems = self._differences(first, second)
        if problems:
            made = None
            raise CorruptionError(
                lines(
                    f"step {state.step + 1} was computed twice, from the same state and batch, with other gradients:",
                    problems,
                    "Nothing was updated, and the state can be used. A program without random kernels computes the "
                    "same bits again, so a rank that does not has broken hardware, or uses kernels that are not "
                    "deterministic: torch.use_deterministic_algorithms(True) excludes these.",
                )
            )
        done: tuple[TrainState, Metrics] = made
        return done

    def _traces(self, batch: Any) -> bool:
        """Tell whether a trace finds the program of a batch; what is wrong with a batch, the step says on all ranks."""
        try:
            self.step.trace(batch)
        except ShardError:
            return False
        return True

    def _once(self, state: TrainState, batch: Any, options: Any) -> tuple[TrainState, Metrics]:
        made: tuple[TrainState, Metrics] = self.step(state, batch, **options)
        return made

    def _printed(self, state: TrainState, batch: Any, options: Any) -> tuple[list[tuple[str, int]], Any]:
        """The gradients of a step, and what it returned: as long as nobody keeps that, the state stays as it is."""
        prints = GradientPrints(self.step.plan)
        with self.step.observed(batch, prints) as prepared:
            prints.gradients = prepared.actions.gradients
            made = self._once(state, batch, options)
        return prints.found, made

    def _differences(self, first: Sequence[tuple[str, int]], second: Sequence[tuple[str, int]]) -> list[str]:
        """Say which ranks differ, and from which unit on. Collective."""
        comm = mesh_communicator(self.step.plan.mesh)
        pairs = enumerate(zip(first, second, strict=False))
        mine = next((at for at, (one, other) in pairs if one != other), -1)
        rows = [int(row[0]) for row in exchange(comm, torch.tensor([mine], device="cpu"))]
        if max(rows) < 0:
            return []
        hosts = exchange_text(comm, socket.gethostname(), HOST_BYTES)
        units = [_units(self.step.plan, first[at][0]) if at >= 0 else "" for at in rows]
        return [
            f"rank {rank}, on {hosts[rank]}: from the backward of {units[rank]} on"
            for rank, at in enumerate(rows)
            if at >= 0
        ]


def _units(plan: Plan, name: str) -> str:
    """The group of a name, by its leaves."""
    group = next(group for group in plan.groups if group.name == name)
    return f"{name}, with {group.leaves[0].path}"


@made_on_each_rank(batches=True)
def _made(step: Any, every: int, plan: Plan) -> RecheckedStep:
    return RecheckedStep(step, every)


def recheck(step: Any, *, every: int) -> Any:
    """Make a train step that computes some steps twice, and compares the gradients before the update.

    Hardware that computes wrong numbers without an error ("silent data corruption", Dixit et al., 2021) makes a run
    worse, and nobody learns of it. Two computations of one step have the same bits on working hardware; where they
    differ, an error names the ranks. A step in ``every`` costs twice its time. What an optimizer computes is not
    compared. Steps that gather on demand are computed once. A skipped step counts twice for ``skip_limit=``.

    Args:
        step: a train step, of ``fs.make_train_step``.
        every: the steps of which one is computed twice, at least 1.

    Returns:
        The step, to be used in the place of the other, also in ``fs.train_loop``.

    Raises:
        PlanError: not a train step; or one that updates in its backward, which cannot be computed again.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), opt, plan)
    >>> step, state = fs.recheck(step, every=2), fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> for _ in range(4):
    ...     state, metrics = step(state, torch.tensor([3.0, 4.0]))
    >>> state.step, step
    (4, <<train step of 1 leaves in 1 groups, sgd(...)>, every 2 steps computed twice>)
    """
    plan, options = getattr(step, "plan", None), getattr(step, "options", None)
    if not isinstance(plan, Plan) or options is None or not hasattr(step, "observed"):
        raise PlanError(f"recheck(step, every=): step is {described(step)}: give what fs.make_train_step returned")
    if type(every) is not int or every < 1:
        raise PlanError(f"recheck(step, every={every!r}): give an int >= 1")
    refuse_stages("recheck(step)", plan)
    policy = options.running.policy
    if isinstance(policy, Policy) and policy.update == "in_backward":
        raise PlanError(
            "recheck(step): a step with update='in_backward' updates while it computes, and cannot be computed again: "
            "use update='deferred'"
        )
    return _made(step, every, plan)
