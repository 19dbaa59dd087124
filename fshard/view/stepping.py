"""``fs.view.step_through``: a step on a virtual mesh, op by op, with a look into the buffers of all ranks."""

import re
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor

from fshard import markup
from fshard.arguments import described
from fshard.errors import PlanError, TreeError, lines
from fshard.patterns import closest
from fshard.played.everywhere import OfAllRanks, part_of
from fshard.played.paused import PausedScheduler
from fshard.runtime.memory import values_of
from fshard.runtime.steps import Prepared
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.sharding.layout import Group
from fshard.state.memory_of_all_ranks import MemoryOfAllRanks
from fshard.state.state_memory import local_view

AROUND = 4
"""Ops that are shown before and after the next one."""


class Stepping:
    """A step under way, which has stopped before op ``position`` on all ranks. ``print`` it; notebooks show it.

    Attributes:
        position: the number of the next op; that of the last one and one more when the step is over.
        result: the state and the metrics once it is over, before that None.
    """

    def __init__(self, step: Any, state: Any, batch: Any) -> None:
        self._plan, self._state, self._step = step._all_plan, state, step
        self._ranks: dict[int, Prepared] = {}
        self.result: Any = None
        scheduler = self._scheduler = PausedScheduler(self._plan.mesh)

        def on_rank() -> Any:
            own, part = step._all_here(), part_of(batch, self._plan)
            with own.observed(part, scheduler) as prepared:
                self._ranks[self._plan.mesh.rank] = prepared
                return own(state, part)

        scheduler.start(on_rank)
        self._conclude()
        self.schedule: Schedule = self._ranks[0].route.schedule  # type: ignore[union-attr]

    @property
    def position(self) -> int:
        """The number of the op before which all ranks are."""
        return len(self.schedule) if self.result is not None else min(self._scheduler.at.values())

    @property
    def op(self) -> Op | None:
        """The next op; None when the step is over."""
        return self.schedule[self.position] if self.position < len(self.schedule) else None

    def next(self, count: int = 1) -> Self:
        """Run the next op, or several, on all ranks.

        Raises:
            Exception: what the step raises; its state is as it was.
        """
        return self._to(self.position + count)

    def until(self, place: str) -> Self:
        """Run up to a breakpoint.

        Args:
            place: ``"before reduce_scatter blocks.3"`` or ``"after forward blocks.0"``: the next op of this text, as
                the schedule prints it; or of this kind, ``"before consensus"``.

        Raises:
            PlanError: no such op is ahead.
            Exception: what the step raises.
        """
        return self._to(find(self.schedule, place, self.position))

    def finish(self) -> tuple[Any, Any]:
        """Run to the end.

        Returns:
            The next state and the metrics, as the step returns them.

        Raises:
            Exception: what the step raises; its state is as it was.
        """
        self._to(len(self.schedule) + 1)
        result: tuple[Any, Any] = self.result
        return result

    def close(self) -> None:
        """Give the step up where its loss function runs next. A step that is past that is made: ``result`` has it."""
        self._scheduler.interrupt()
        try:
            self._to(len(self.schedule) + 1)
        except KeyboardInterrupt:
            return

    def gathered(self, group: str, rank: int = 0) -> dict[str, Tensor]:
        """Return what units of a rank read of a group now, by path: copies of its whole leaves.

        Raises:
            PlanError: the group is not gathered at this op.
            TreeError: the group or the rank does not exist.
        """
        found, prepared = self._group(group), self._ranks[self._rank(rank)]
        if found.id not in prepared.actions.readable:
            raise PlanError(f"{group} is not gathered on rank {rank} before op {self.position}, '{self.op}'")
        leaves = prepared.engine.slots.groups[found.id].leaves
        return {leaf.path: tensor.detach().clone() for leaf, tensor in zip(found.leaves, leaves, strict=True)}

    def gradient(self, group: str, rank: int = 0) -> dict[str, Tensor]:
        """The full gradient of a group on a rank, before its reduction, by path: copies.

        Leaves without one are left out.

        Raises:
            PlanError: it is not there at this op.
            TreeError: the group or the rank does not exist.
        """
        found, prepared = self._group(group), self._ranks[self._rank(rank)]
        parts = prepared.actions.gradients.full(found.id)
        if parts is None:
            raise PlanError(f"rank {rank} holds no full gradient of {group} before op {self.position}, '{self.op}'")
        return {leaf.path: parts[n].detach().clone() for n, leaf in enumerate(found.leaves) if n in parts}

    def shard(self, group: str, rank: int = 0) -> dict[str, Tensor]:
        """Return what a rank keeps of the parameters of a group, by path: copies of its parts, 1-D where they are flat.

        Raises:
            PlanError: the step has taken the state.
            TreeError: the group or the rank does not exist.
        """
        found, memory = self._group(group), self._state.memory
        if self.result is not None:
            raise PlanError("the step is over: look into the state that it returned, stepping.result[0].params")
        kept = memory.memories[self._rank(rank)]
        param = values_of(found, kept.shards(self._state.step)[found.id].param)
        return {leaf.path: local_view(kept.plan, found, n, param).clone() for n, leaf in enumerate(found.leaves)}

    def __str__(self) -> str:
        at = self.position
        first, last = max(0, at - AROUND), min(len(self.schedule), at + AROUND + 1)
        rows = [f"{'->' if n == at else '  '} {n:>4} {self.schedule[n]}" for n in range(first, last)]
        gathered = [group.name for group in self._plan.groups if group.id in self._ranks[0].actions.readable]
        over = "over" if self.result is not None else f"before op {at} of {len(self.schedule)}, on all ranks"
        return lines(f"a step, {over}", rows, f"readable on rank 0: {', '.join(gathered) or 'nothing'}")

    __repr__ = __str__

    def _repr_html_(self) -> str:
        at = self.position
        rows = [["->" if n == at else "", str(n), str(op)] for n, op in enumerate(self.schedule)]
        near = rows[max(0, at - AROUND) : at + AROUND + 1]
        whole = markup.fold(f"all {len(rows)} ops", markup.table(["", "", "op"], rows, 3))
        return markup.shown(str(self).splitlines()[0], markup.table(["", "", "op"], near, 3), whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.result is None and not self._scheduler.over:
            self.close()

    def _to(self, position: int) -> Self:
        if not self._scheduler.over:
            self._scheduler.go(position)
        self._conclude()
        return self

    def _conclude(self) -> None:
        if self._scheduler.over and self.result is None:
            mesh: Any = self._plan.mesh
            self.result = mesh.join(self._scheduler.results())

    def _group(self, name: str) -> Group:
        known: Mapping[str, Group] = {group.name: group for group in self._plan.groups}
        if name not in known:
            raise TreeError(f"the plan has no group {name!r}{closest(name, known)}: print(plan) names them")
        return known[name]

    def _rank(self, rank: int) -> int:
        if rank not in self._ranks:
            raise TreeError(f"rank={rank!r}: the mesh has ranks 0 to {len(self._ranks) - 1}")
        return rank


def find(schedule: Schedule, place: str, position: int) -> int:
    """The op before which to stop: the first one from a position on that a breakpoint names.

    Raises:
        PlanError: a breakpoint of another form, or of no op that is ahead.
    """
    words = re.fullmatch(r"(before|after) (.+)", place) if isinstance(place, str) else None
    if words is None:
        raise PlanError(f"until({place!r}): give 'before' or 'after' and an op, such as 'before reduce_scatter root'")
    after = words[1] == "after"
    for number in range(position, len(schedule)):
        if words[2] in (str(schedule[number]), schedule[number].kind):
            return number + after
    known = dict.fromkeys(str(op) for op in schedule[position:])
    raise PlanError(f"until({place!r}): no such op is ahead of op {position}{closest(words[2], known)}")


def step_through(step: Any, state: Any, batch: Any) -> Stepping:
    """Make a step op by op: all ranks of a virtual mesh stop before every op of its schedule.

    It stops before the first op. ``next()`` and ``until("before reduce_scatter blocks.3")`` go on, ``gathered``,
    ``gradient`` and ``shard`` look into buffers of any rank, and ``finish()`` returns what the step returns.

    Args:
        step: a train step whose plan is on a virtual mesh, made outside of ``mesh.run``.
        state: the state of all ranks.
        batch: the global batch.

    Raises:
        PlanError: a step of another mesh, or one that has no schedule before it runs.
        TreeError: a state of one rank alone.

    >>> mesh = fs.virtual_mesh((2,), ("data",))
    >>> params = {"w": torch.arange(4.0)}
    >>> plan = fs.make_plan(params, mesh, [("w", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(1.0)
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), opt, plan)
    >>> stepping = fs.view.step_through(step, fs.init_state(plan, opt, params=params), torch.ones(4, 4))
    >>> stepping.until("after wait all_gather root").gathered("root", rank=1)
    {'w': tensor([0., 1., 2., 3.])}
    >>> stepping.shard("root", rank=1)
    {'w': tensor([])}
    >>> state, metrics = stepping.finish()
    >>> state.params["w"]
    tensor([-2., -1.,  0.,  1.])
    """
    if not isinstance(step, OfAllRanks) or not hasattr(type(step), "observed"):
        raise PlanError(
            f"fs.view.step_through(step, state, batch) takes a train step of a plan on fs.virtual_mesh, made outside "
            f"of mesh.run, and was given {described(step)}. The ops of a step function are in "
            f"step.trace(state, batch).schedule, and their times in step.measured; a train step of its loss, or a part "
            f"of it, such as fs.value_and_grad, can be stepped through"
        )
    if not isinstance(getattr(state, "memory", None), MemoryOfAllRanks):
        raise TreeError(
            f"fs.view.step_through takes the state of all ranks, from fs.init_state outside of mesh.run or "
            f"mesh.join, and was given {described(state)}"
        )
    return Stepping(step, state, batch)
