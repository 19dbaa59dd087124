"""The outer step: a train step that each replica makes by itself, and exchanges between the replicas."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fshard.arguments import Want, expect
from fshard.errors import PlanError, lines
from fshard.optim.base import Optimizer
from fshard.optim.contract import LearningRate, contract
from fshard.outer_steps.fragments import make_fragments, table_of
from fshard.outer_steps.outer_exchange import Exchange, FragmentFlight, Outer
from fshard.runtime.comm import collective_call, enter, mesh_communicator
from fshard.runtime.comm.facts import compare
from fshard.runtime.steps import refuse_transforms
from fshard.sharding.layout import make_groups
from fshard.sharding.part_mesh import ReplicaMesh, joined_part
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import refuse_stages
from fshard.sharding.wire import NAMES, POWER, SCALED, WireFormat
from fshard.state.equal import Equal
from fshard.state.exchanges import Exchanges, calm_step
from fshard.state.state_memory import StateMemory
from fshard.state.train_state import TrainState, expect_state
from fshard.training.metrics import Metrics
from fshard.training.train_step import TrainStep, programs_of


def plan_of_replica(plan: Plan, over: str, grid: int) -> Plan:
    """The plan of this rank's replica: the same leaves and rules, on a mesh where the axis of replicas has one rank.

    Args:
        plan: of all replicas.
        over: the axis along which they lie.
        grid: leaves begin, and shards end, at multiples of this many elements.

    Raises:
        PlanError: the mesh has no such axis, a leaf is sharded along it, or it does not cut the batch.
    """
    mesh = plan.mesh
    mesh.axis_size(over)
    cut = [leaf for leaf in plan.leaves.values() if over in (*leaf.at_rest.axes, *leaf.compute.axes, *leaf.opt_axes)]
    if cut:
        rows = [f"{leaf.path}  {list(leaf.shape)}  {leaf.opt or leaf.at_rest}" for leaf in cut]
        remedy = f"Each replica has all of a model: shard these over other axes than {over!r}."
        raise PlanError(lines(f"fs.outer(over={over!r}): these leaves are sharded along that axis:", rows, remedy))
    if over not in plan.batch.axes:
        raise PlanError(
            f"fs.outer(over={over!r}): batch={plan.batch} is not cut along that axis, so all replicas would train on "
            f"the same rows: name it, such as batch=fs.P(({over!r}, ...))"
        )
    part = joined_part(mesh, over, ReplicaMesh)
    owners = {leaf.path: group.unit for group in plan.groups for leaf in group.leaves}
    leaves = {path: replace(leaf, grid=grid) for path, leaf in plan.leaves.items()}
    groups = make_groups(leaves, owners, part, plan.batch.axes)
    return Plan(part, plan.batch, leaves, groups, plan.inits, plan.precision)


BLOCK = 256
"""Elements of a leaf that share a scale."""


class OuterStep(TrainStep):
    """``step(state, batch) -> (state, metrics)``, with exchanges between replicas. Made by ``fs.outer``.

    Attributes:
        plan: of one replica: the plan of the inner step, on the ranks of this replica alone.
        opt: the inner optimizer, with the buffers of outer steps.
    """

    opt: Outer

    def __init__(self, step: TrainStep, plan: Plan, opt: Outer) -> None:
        form = None if opt.wire is None else WireFormat(opt.wire, BLOCK if opt.wire in SCALED else 1)
        fragments = make_fragments(plan, opt.fragments, form)
        mesh = plan.mesh
        assert isinstance(mesh, ReplicaMesh)
        programs = programs_of(plan, step.options, contract(opt))
        infos = (
            each.info(opt.over, mesh.replicas, opt.every, opt.table.offset(number), opt.delay)
            for number, each in enumerate(fragments)
        )
        programs = replace(programs, infos=(*programs.infos, *infos))
        super().__init__(step.loss_fn, opt, plan, step.options, programs)
        self._exchange = Exchange(plan, mesh, opt, fragments, form)
        self._together = Equal(plan, step.options.told(), opt, replicas=True)
        self._flights: dict[int, FragmentFlight] = {}
        self._returned: StateMemory | None = None
        self._stops = False

    @property
    def exchanges(self) -> str:
        """Return what travels between replicas, and when, as text."""
        exchange = self._exchange
        return table_of(exchange.fragments, self.opt.table, exchange.mesh.replicas, exchange.form)

    def sent(self, step: int) -> int:
        """The bytes that this rank sends to other replicas after a step, given the number of steps made by then."""
        leaving, exchange = self.opt.table.leaving(step), self._exchange
        return 0 if leaving is None else exchange.nbytes(leaving) * (exchange.mesh.replicas - 1)

    def __repr__(self) -> str:
        return f"<outer step over {self.opt.over!r}, every {self.opt.every} steps, of {super().__repr__()}>"

    @collective_call
    def __call__(
        self, state: TrainState, batch: Any, *, lr: LearningRate = None, stop: bool = False
    ) -> tuple[TrainState, Metrics]:
        """Make one step of this replica, and the exchanges that are due after it.

        Args:
            state: the state, of ``fs.init_state(step.plan, step.opt)``, or as this step returned it.
            batch: this rank's part of the global batch.
            lr: the learning rate of this step of the inner optimizer.
            stop: ask all ranks to stop. Replicas learn of it with the next fragment: ``metrics.stop`` becomes True on
                all of them after the same step.

        Returns:
            The next state, and the metrics of this replica.

        Raises:
            PlanError: the state is of an outer step with other exchanges, and a fragment is under way.
            ScheduleError: replicas are at different steps.
            NonFiniteError: as a train step; or parameters of a replica are not finite when they are exchanged, on all
                ranks of all replicas. The anchor is as it was.
            ShardError: as a train step. A replica that fails in its own step has changed nothing; the others wait for
                it at the next exchange.
        """
        refuse_transforms("an outer step")
        expect_state(state, "step")
        state.check_plan(self.plan)
        inner = replace(state, past=state.past.alone())
        self._updating.check(inner)
        if state.memory is not self._returned:
            self._meet(state)
        self._stops = self._stops or stop
        state, metrics = super().__call__(inner, batch, lr=lr)
        stopped = self._exchange_due(state)
        state = replace(state, past=replace(state.past, exchanges=self._exchanges))
        self._returned = state.memory
        return state, replace(metrics, stop=stopped)

    def _meet(self, state: TrainState) -> None:
        """Compare a state that this step has not returned, and send again what is under way. All replicas."""
        self._check_under_way(state)
        whole = self._exchange.mesh.whole
        enter(self.plan.mesh, "outer step")  # where a rank of this replica says that it takes no part
        enter(whole, "outer step")
        compare(mesh_communicator(whole), self._together.of(state))
        self._exchange.between()
        for flight in self._flights.values():
            flight.work.wait()
        self._flights.clear()
        for number, left in self.opt.table.under_way(state.step).items():
            self._flights[number] = self._exchange.send(number, left, state.applied(), again=True)

    @property
    def _exchanges(self) -> Exchanges:
        """Return what travels when."""
        return Exchanges(self.opt.table, self.opt.fragments, self.opt.over)

    def _check_under_way(self, state: TrainState) -> None:
        """Refuse a state of another outer step while a fragment is under way, here or there.

        Raises:
            PlanError: with a step after which none is.
        """
        before, here, step = state.past.exchanges, self._exchanges, state.step
        tables = [] if before in (None, here) else [before.table, here.table]
        if not any(table.under_way(step) for table in tables):
            return
        free = calm_step(step, *tables)
        when = "there is no such step: restore a checkpoint of parameters" if free is None else f"such as step {free}"
        raise PlanError(
            f"after step {step} a fragment is under way by {before} or {here}: the state was made by an outer step "
            f"with the first, and this one has the second. Change over after a step with which none is, {when}"
        )

    def _exchange_due(self, state: TrainState) -> bool:
        """Receive the fragment that arrives after this step, and send the one that leaves: it may be the same."""
        delay, stopped = self.opt.delay, False
        if not delay:
            self._send(state)
        if (arriving := self.opt.table.arriving(state.step)) is not None:
            stopped = self._exchange.receive(self._flights.pop(arriving), state.applied())
            self._stops = self._stops and not stopped
        if delay:
            self._send(state)
        return stopped

    def _send(self, state: TrainState) -> None:
        if (leaving := self.opt.table.leaving(state.step)) is not None:
            self._flights[leaving] = self._exchange.send(leaving, state.step, state.applied(), self._stops)


def outer(
    step: TrainStep,
    opt: Optimizer,
    *,
    every: int,
    over: str = "replica",
    wire: str | None = None,
    fragments: int | Sequence[str] = 1,
    delay: int = 0,
    mix: float | None = None,
) -> OuterStep:
    """Let replicas train apart, and exchange what they have learned every so many steps.

    Each replica, the ranks that differ along other axes than ``over``, makes the inner step by itself. After ``every``
    steps the difference between the anchor, from which all replicas started, and a replica's parameters is sent to the
    others. The mean of these differences is the gradient with which the outer optimizer updates the anchor, and
    replicas go on from it: DiLoCo (Douillard et al., 2023). ``fragments`` exchanges a part of the model at a time, and
    ``delay`` lets it travel while the next steps compute: Streaming DiLoCo (2025). With ``fs.optim.sgd(1.0)`` replicas
    are averaged: local SGD (Stich, 2019).

    The state is that of ``fs.init_state(step.plan, step.opt)``. ``state.params`` are this replica's parameters. Its
    optimizer state has the anchor besides (``fs.averaged(state, "anchor")`` is a state of it for eval steps), the outer
    optimizer's buffers as ``outer_...``, and ``delta``, which is what this replica has sent and what rounding has left.
    A checkpoint holds what each replica has, and resumes it bit for bit. Replicas that it does not have start from the
    anchor.

    Args:
        step: a train step, of a plan on a mesh that has the axis. Its batch is cut along that axis, and no leaf is.
        opt: the outer optimizer, such as ``fs.optim.sgd(0.7, momentum=0.9, nesterov=True)``. It must update each
            element by itself.
        every: the steps between two exchanges of a fragment.
        over: the mesh axis along which replicas lie.
        wire: the format of differences, as in ``fs.Wire``; each replica adds to its next difference what rounding has
            left of this one. None sends them exactly.
        fragments: their number, for parts of equal size that leave one after the other; or patterns on paths of leaves;
            a leaf belongs to the first that matches.
        delay: the steps for which a fragment travels; 0 waits for it.
        mix: how much of its own values a replica keeps when a fragment arrives, in [0, 1). The default is 0 without a
            delay, so that replicas are equal after an exchange, and 0.5 with one: what was learned meanwhile is kept.

    Returns:
        A train step for the plan of one replica, ``step.plan``.

    Raises:
        PlanError: an axis that the mesh does not have, that shards parameters, or that does not cut the batch; numbers
            out of range; fragments without leaves; options of the inner step that replicas would decide differently.

    >>> mesh, w = fs.make_mesh((1, -1), ("replica", "data")), torch.ones(4)
    >>> plan = fs.make_plan({"w": w}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P(("replica", "data")))
    >>> inner = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), fs.optim.sgd(0.25), plan)
    >>> step = fs.outer(inner, fs.optim.sgd(0.5), every=2)
    >>> state = fs.init_state(step.plan, step.opt, params={"w": w})
    >>> for _ in range(2):
    ...     state, metrics = step(state, torch.ones(4))
    >>> state.params["w"], state.opt_state["anchor"]["w"]
    (tensor([0.7500, 0.7500, 0.7500, 0.7500]), tensor([0.7500, 0.7500, 0.7500, 0.7500]))
    """
    wants: list[Want] = [
        ("step", step, TrainStep, "what fs.make_train_step returned"),
        ("over", over, str, "the name of a mesh axis"),
        ("fragments", fragments, (int, list, tuple), "a number, or a list of patterns"),
    ]
    expect("fs.outer(step, opt)", wants)
    refuse_stages("fs.outer(step, opt)", step.plan)
    if step.plan.mesh.everywhere:
        raise PlanError(
            "fs.outer outside of mesh.run: replicas hold different parameters, which no whole tensor can show: make "
            "and call it in mesh.run(fn)"
        )
    mix = (0.5 if delay else 0.0) if mix is None else mix
    problems = [*_number_problems(every, fragments, delay, mix, wire), *_step_problems(step)]
    if problems:
        raise PlanError(lines("fs.outer:", problems, "Correct these arguments, or those of the inner step."))
    kept = fragments if isinstance(fragments, int) else tuple(fragments)
    around = Outer(step.opt, opt, every, over, None if wire == "fp32" else wire, kept, delay, float(mix))
    return OuterStep(step, plan_of_replica(step.plan, over, BLOCK if wire in SCALED else 1), around)


def _number_problems(every: Any, fragments: Any, delay: Any, mix: Any, wire: Any) -> list[str]:
    """Say which numbers are out of range, and which formats there are not."""
    found = [*_time_problems(every, fragments, delay)]
    if not isinstance(mix, int | float) or isinstance(mix, bool) or not 0 <= mix < 1:
        found.append(f"mix={mix!r} must be a number in [0, 1)")
    if wire is not None and wire not in (names := [name for name in NAMES if name != POWER]):
        found.append(f"wire={wire!r} is none of {', '.join(map(repr, names))}")
    return found


def _time_problems(every: Any, fragments: Any, delay: Any) -> list[str]:
    """Say which numbers of steps and of fragments are out of range."""
    found = []
    whole = [(name, value) for name, value in (("every", every), ("delay", delay)) if not _is_int(value)]
    found += [f"{name}={value!r} must be an int, a number of steps" for name, value in whole]
    number = fragments if _is_int(fragments) else len(fragments) if not isinstance(fragments, int) else 0
    if number < 1:
        found.append(f"fragments={fragments!r}: give a number from 1 on, or patterns")
    if not whole and every < 1:
        found.append(f"every={every} must be at least 1")
    elif not whole and not 0 <= delay < every:
        found.append(
            f"delay={delay} must be from 0 to every - 1 = {every - 1}: a fragment arrives before it leaves again"
        )
    elif not whole and number > every:
        found.append(f"fragments={fragments!r}: {number} are more than the {every} steps in which they leave")
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _step_problems(step: TrainStep) -> list[str]:
    """List options of the inner step that replicas would decide differently: their steps had different numbers."""
    options, found = step.options, []
    if isinstance(step, OuterStep):
        found.append("step is an outer step already")
    for name in ("skip_norm", "skip", "loss_scale"):
        if getattr(options, name) is not None:
            found.append(f"{name}= of the inner step skips steps on one replica and not on the others")
    if options.running.graph:
        found.append("Policy(graph=) of the inner step: the host steers exchanges between replicas")
    if contract(step.opt).steps is not None:
        found.append("fs.optim.every inside: use accumulate=, or a larger every= here")
    return found
