"""The order of a step function's parts, traced or live: which pass reads what, and what must be over before."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import PlanError, StateError, TreeError
from fshard.optim.contract import LearningRate
from fshard.parts.returned_values import lasting
from fshard.parts.step_arguments import (
    Arguments,
    Final,
    FunctionResult,
    check_data,
    check_mesh,
    check_origins,
    final_of,
    returned_states,
)
from fshard.parts.step_values import (
    Bank,
    ComputedFlat,
    Number,
    RunningFlat,
    RunningMemory,
    RunningStep,
    StateParams,
    Updated,
    current,
    memory_of,
    number_of,
    with_memory,
)
from fshard.parts.update_metrics import UpdateMetrics
from fshard.parts.versions import Version, base_of, same_leaves
from fshard.runtime.engine.loss_result import Mean, as_means, means_of
from fshard.runtime.execution import Shards
from fshard.runtime.memory import values_of
from fshard.runtime.steps import PassSpec, widened
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.flat import Flat, FlatForm, flat_of, form_of, known_flat
from fshard.state.train_state import TrainState
from fshard.torch_internals import DisableFuncTorch


@dataclass(eq=False)
class Composition(RunningStep):
    """A step function under way.

    Attributes:
        states: the states that it was given, those in the batch behind the others.
        own: how many of them are not in the batch.
        versions: the parameters that passes have read, in the order of their first pass.
        locals: the points so far at which the code between passes has read shards.
        passes: the passes so far.
        derivatives: the calls so far of tools that take derivatives, passes or not.
        complete: the banks and states that are what they stand for: gradients of means, updated parameters.
        over: whether nothing of it can be read any more.
        read: the banks that the code since the latest pass has read. Their memory may go before the next one.
        numbers: those that ranks have exchanged before the end of the step, by kind, origin and place.
    """

    states: Sequence[TrainState]
    own: int
    versions: list[Version] = field(default_factory=list)
    locals: int = 0
    passes: int = 0
    derivatives: int = 0
    complete: set[tuple[str, Any]] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    over: bool = False
    numbers: dict[tuple[str, Any, int], float] = field(default_factory=dict)

    def restart(self) -> None:
        """Begin to count anew."""
        self.locals = self.passes = self.derivatives = 0
        self.over = False

    # -- what the function is given, and what it returns --------------------------------------------------------------

    def inside(self, given: Arguments) -> tuple[Any, Any]:
        """The arguments of the function, with states of this step in the place of real ones."""

        def one(number: int) -> TrainState:
            state = self.states[number]
            return with_memory(state, RunningMemory(self, state.plan, self.given(number), number))

        return given.filled(one)

    def given(self, number: int) -> StateParams:
        """The parameters of a state that the step was given."""
        return StateParams(self, form_of(self.states[number].plan), number)

    def result(self, returned: Any) -> FunctionResult:
        """Return what the function returned, taken apart.

        Raises:
            LossError: no pair of states and metrics; not each state that the step was given, once.
            TreeError: a state that is not of this step; two updates of a leaf.
        """
        finals = [final_of(memory_of(state, self)) for state in returned_states(returned)]
        check_origins([final.memory.origin for final in finals], self.own)
        self._exchange_dropped(returned[1], finals)
        copied = self._copied(finals)
        return FunctionResult(returned[0], lasting(returned[1]), tuple(finals), copied)

    def _copied(self, finals: Sequence[Final]) -> tuple[Updated, ...]:
        """The updates whose gradients no schedule keeps, which are complete on return.

        A schedule keeps one gradient for each group that a pass reads, and each gradient for one update.
        """
        copied, spent, taken = list[Updated](), list[Flat](), set[tuple[int, int]]()
        read = {version.given for version in self.versions}
        for final in finals:
            for updated in final.updates:
                groups = {(final.memory.origin, group.id) for group in updated.part.form.groups}
                kept = final.memory.origin in read and not groups & taken and updated.grads not in spent
                if not kept and isinstance(updated.grads, RunningFlat):
                    self.chunks(updated.grads)
                    copied.append(updated)
                taken |= groups
                spent.append(updated.grads)
        return tuple(copied)

    def _exchange_dropped(self, metrics: Any, finals: Sequence[Final]) -> None:
        """Exchange the norms of updates that no state has: all others are known when the step is over."""
        kept = [updated for final in finals for updated in final.updates]
        for leaf in tree.leaves(metrics):
            number = number_of(leaf)
            if number is not None and number.kind == "norm" and number.of not in kept:
                self.number(number)

    # -- parts --------------------------------------------------------------------------------------------------------

    def gradient(self, part: Any, params: Any, batch: Any) -> Any:
        """Perform ``fs.value_and_grad``."""
        source = self._source(part.plan, params)
        check_data(batch)
        version = self._version(source, part.spec.plan)
        number = self._next()
        dtype, aux = self.run_pass(part.spec, number, version, batch)
        grads = self.bank(part.grads, number).tree()
        part.loss.refuse_aux(aux)
        loss = Number("loss", number, 0, widened([dtype])).tensor(self)
        return ((loss, self._named(number, aux)) if part.loss.has_aux else loss), grads

    def update(self, part: Any, state: TrainState, grads: Any, lr: LearningRate) -> Any:
        """Perform ``fs.make_update``: when somebody reads it, or when the step is over."""
        before = memory_of(state, self)
        if state.plan is not part.plan and state.plan != part.plan:
            raise TreeError("the state was made for another plan: make the update and the state from the same one")
        if before.origin >= self.own:
            raise TreeError("a state of the batch is only read: give states that the step updates as its state")
        part.check_state(self.states[before.origin], lr)
        flat = part.fitting(grads)
        if part.every > 1:  # its call adds to them what those before have carried
            self.chunks(self.given(before.origin))
            flat = ComputedFlat(self, flat.form, {group: chunk.clone() for group, chunk in flat.chunks.items()})
        elif not isinstance(flat, RunningFlat):  # the update waits, and who made them may write to them
            flat = Flat(flat.form, {group: chunk.clone() for group, chunk in flat.chunks.items()})
        updated = Updated(before, part, flat, state, lr)
        memory = RunningMemory(self, state.plan, updated, before.origin)
        norm, *more = [
            Number("norm", updated, at, part.updating.wide).tensor(self) for at in range(len(part.norms.names) + 1)
        ]
        skipped = torch.tensor(False, device="cpu")
        if part.may_skip:
            skipped = Number("skipped", updated, 0, torch.bool).tensor(self)
        return with_memory(part.after(state, False), memory), UpdateMetrics(
            norm, skipped, dict(zip(part.norms.names, more, strict=True))
        )

    def evaluate(self, part: Any, state: TrainState, batch: Any) -> Any:
        """Perform what ``fs.make_eval_step`` made."""
        source = self._source(part.plan, state)
        check_data(batch)
        version = self._version(source, part.spec.plan)
        number = self._next()
        _, result = self.run_pass(part.spec, number, version, batch)
        return self._named(number, as_means(result))

    def derivative(self, part: Any, params: Any, directions: Sequence[Any], batch: Any) -> Any:
        """Perform a derivative along directions: a gradient, or values; None if no trace finds its program."""
        check_data(batch)
        self.derivatives += 1
        if not self.scheduled(part, batch):
            return None
        at, *along = [self._source(part.plan, given) for given in (params, *directions)]
        chunks = part.joined(self._lasting(at), [self._lasting(each) for each in along])
        source = ComputedFlat(self, form_of(part.spec.plan), dict(enumerate(chunks)))
        version = self._version(source, part.spec.plan, at)
        number = self._next()
        _, aux = self.run_pass(part.spec, number, version, batch)
        return self.bank(part.form, number).tree() if part.spec.train else self._named(number, as_means(aux))

    def _lasting(self, flat: RunningFlat) -> Mapping[int, Tensor]:
        """The chunks of a tree, which no other pass writes to. Those of gradients are copied."""
        chunks = self.chunks(flat)
        return {group: chunk.clone() for group, chunk in chunks.items()} if isinstance(flat, Bank) else chunks

    def _next(self) -> int:
        """The number of the next pass."""
        self.read.clear()
        self.passes += 1
        return self.passes - 1

    def _named(self, number: int, aux: Any) -> Any:
        """The auxiliary values of a pass, with numbers of the step in the place of means."""
        means = iter(range(len(means_of(aux))))

        def named(leaf: Any) -> Any:
            if not isinstance(leaf, Mean):
                return leaf
            return Number("mean", number, next(means), widened([leaf.total.dtype])).tensor(self)

        return tree.mapped(named, aux)

    # -- what parts read ----------------------------------------------------------------------------------------------

    def chunks(self, flat: RunningFlat) -> Mapping[int, Tensor]:
        """The chunks of a tree, once all that fills them is over.

        Raises:
            StateError: they are those of a step that is over.
        """
        if (self.over or flat.over) and not isinstance(flat, ComputedFlat):
            raise StateError(
                "gradients or parameters of a step function were used after its step was over, when their memory holds "
                "others: return them in its metrics, which copies them, or carry them in a state"
            )
        with DisableFuncTorch():  # a transform under way would wrap what is made here
            self._complete(flat)
            return flat.held

    def _complete(self, flat: RunningFlat) -> None:
        """Wait for what fills a tree."""
        if isinstance(flat, Bank) and flat.number not in self.read:
            self.read.add(flat.number)
            self.reach_local("bank", flat.number)
            if ("bank", flat.number) not in self.complete:
                self.complete.add(("bank", flat.number))
                self.settle_bank(flat)
        if isinstance(flat, StateParams) and ("state", flat.state) not in self.complete:
            self.complete.add(("state", flat.state))
            self.reach_local("state", flat.state)

    def number(self, value: Number) -> Tensor:
        """The value of a number of this step, now."""
        key = value.kind, value.of, value.at
        with DisableFuncTorch():
            if key not in self.numbers:
                if value.kind == "norm" and isinstance(value.of.grads, RunningFlat):
                    self.chunks(value.of.grads)
                self.numbers[key] = self._skips(value.of) if value.kind == "skipped" else self.exchanged(value)
            return self.number_tensor(self.numbers[key], value.dtype)

    def _skips(self, updated: Updated) -> float:
        """Tell whether an update does not happen, by its norm."""
        part, state = updated.part, updated.state
        if part.skip is not None:
            raise PlanError(
                "make_update(skip=) is asked at the end of the step, and the step function reads metrics.skipped "
                "before: return it with the metrics, or give skip_norm="
            )
        self.number(Number("norm", updated, 0, torch.float64))
        return float(part.rule.skips(state.scale, 0.0, self.numbers["norm", updated, 0]))

    def apply(self, memory: RunningMemory) -> None:
        """Apply an update that somebody reads, to copies of what it updates."""
        updated = memory.source
        assert isinstance(updated, Updated)
        if updated.part.may_skip:
            raise PlanError(
                "make_update with loss_scale=, skip_norm= or skip= knows at the end of the step whether the update "
                "happens, and the step function reads the state that it returned before: return that state as it is"
            )
        before = updated.before.flat()
        self.chunks(before)
        if isinstance(updated.grads, RunningFlat):
            self.chunks(updated.grads)
        shards = self.updated(updated, updated.before)
        memory.shards_made = shards
        memory.source = ComputedFlat(
            self, before.form, {g.id: values_of(g, shards[g.id].param) for g in before.form.groups}
        )

    def replaced(self, memory: RunningMemory, params: Any) -> RunningMemory:
        """A state of this step with other parameters."""
        plan = memory.plan
        self.chunks(memory.flat())  # its optimizer state is that after its update
        given = self._source(plan, params)
        source = ComputedFlat(self, given.form, {group: chunk.clone() for group, chunk in self.chunks(given).items()})
        made = RunningMemory(self, plan, source, memory.origin)
        before = self.shards_of(memory)
        made.shards_made = Shards(
            [kept.with_param(source.held[group.id]) for group, kept in zip(plan.groups, before, strict=True)]
        )
        return made

    def _source(self, plan: Plan, params: Any) -> RunningFlat:
        """The parameters that a pass reads."""
        check_mesh("the plan of a part", self.states[0].plan.mesh, plan.mesh)
        flat: Flat | None
        if isinstance(params, TrainState):
            if params.plan is not plan and params.plan != plan:
                raise TreeError("the state was made for another plan than the part of the step that reads it")
            flat = memory_of(params, self).flat()
        else:
            flat = known_flat(params)
        if not isinstance(flat, RunningFlat) or flat.running is not self or not same_leaves(flat.form, plan):
            made = flat_of(tree.mapped(current, params), form_of(plan), "params")
            flat = ComputedFlat(self, made.form, made.chunks)
        return flat

    def _version(self, source: RunningFlat, read: Plan, at: RunningFlat | None = None) -> int:
        """The number of the parameters that a pass reads in the dtypes of a plan, with tangents if ``at`` has none."""
        plan, given = source.form.plan, source.state if isinstance(source, StateParams) else None
        if plan.compute_dtypes != read.compute_dtypes:
            self.chunks(source)  # what else reads them gathers them by itself
            plan, given = read, None
        for number, known in enumerate(self.versions):
            same = known.flat is source or (given is not None and known.given == given)
            if same and known.plan is plan:
                return number
        base = None if at is None else base_of(self.versions, at)
        self.versions.append(Version(source, plan, given, at or source, base))
        version = len(self.versions) - 1
        if given is None:
            self.place(version, source)
            self.reach_local("make", version)
        return version

    # -- by trace or live ---------------------------------------------------------------------------------------------

    @abstractmethod
    def run_pass(self, spec: PassSpec, number: int, version: int, batch: Any) -> tuple[torch.dtype, Any]:
        """Run a pass.

        Returns:
            The dtype of its loss, and its auxiliary values, with ``fs.Mean`` for means over ranks.
        """

    @abstractmethod
    def scheduled(self, part: Any, batch: Any) -> bool:
        """Tell whether a derivative is a pass of the step: whether a trace finds its program."""

    @abstractmethod
    def bank(self, form: FlatForm, number: int) -> Bank:
        """The gradients of a pass."""

    @abstractmethod
    def reach_local(self, what: str, number: int) -> None:
        """The code between passes reads a bank of gradients, or a state, or has made a version of parameters.

        What fills that is over on return.
        """

    @abstractmethod
    def settle_bank(self, bank: Bank) -> None:
        """Make gradients those of the global mean."""

    @abstractmethod
    def place(self, version: int, source: RunningFlat) -> None:
        """Let passes read parameters that the step has made."""

    @abstractmethod
    def shards_of(self, memory: RunningMemory) -> Shards:
        """The shards of a state of the step that has no update waiting."""

    @abstractmethod
    def exchanged(self, value: Number) -> float:
        """A number of this step, by an exchange of its own."""

    @abstractmethod
    def differentiate(self, equal: Equal) -> None:
        """Note what ranks must have in common for a derivative that the code between passes takes of a loss."""

    @abstractmethod
    def meet(self, mesh: Mesh, row: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank of a mesh. Collective."""

    @abstractmethod
    def number_tensor(self, number: float, dtype: torch.dtype) -> Tensor:
        """A number as a tensor."""

    @abstractmethod
    def updated(self, updated: Updated, before: RunningMemory) -> Any:
        """Copies of shards, updated."""
