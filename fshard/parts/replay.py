"""A step function on its schedule: parts find the ops that the trace has foreseen, in their order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard.collectives.ranks import Ranks
from fshard.collectives.raw import gather, sum_all
from fshard.parts.assemble import Assembled
from fshard.parts.compose import Composition
from fshard.parts.copy_marks import Marks
from fshard.parts.record import RecordedLocal, RecordedPass, RecordedUpdate, recorded_updates
from fshard.parts.returned_values import marked
from fshard.parts.step_arguments import FunctionResult
from fshard.parts.step_values import Bank, Number, RunningFlat, RunningMemory, StateParams, Updated
from fshard.parts.told_rates import check_rates, told_rate
from fshard.runtime.engine.batch import check_detached, check_device, check_even, microbatches, signature
from fshard.runtime.engine.loss_result import as_means, fingerprint
from fshard.runtime.engine.plain_values import PlainTold, PlainValues
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.execution import Shard, Shards, partly_updated
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.memory import memory_space, values_of
from fshard.runtime.memory.memory_spaces import deallocate
from fshard.runtime.steps import PassSpec
from fshard.runtime.steps.consensus import check_counts, mean_scale, quotient
from fshard.runtime.steps.passes import Passes
from fshard.runtime.steps.readings import Reading, RuleNorms, answers, mean_pairs, pair, plain, squares
from fshard.runtime.steps.records import PassResult
from fshard.schedule.ops import LOCAL, ROOT
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan
from fshard.state.equal import Equal
from fshard.state.flat import FlatForm
from fshard.state.settle import fetch


@dataclass(frozen=True)
class PassExecutor:
    """The executor of a step as one of its passes sees it.

    Attributes:
        executor: the executor.
        first: the number of the pass's first microbatch among those of the step.
        reach: the program is at this compute op: whatever must precede it is done on return.
        settle: the compute op is over: start what can run beside the code that follows.
        readable: whether all of these groups can be read in this pass now.
        outside: whether code outside of units may read this group.
    """

    executor: Scheduled
    first: int
    reach: Callable[[str, str, int], None]
    settle: Callable[[], None]
    readable: Callable[[Sequence[int]], bool]
    outside: Callable[[int], bool]

    def begin_microbatch(self, index: int) -> None:
        """A microbatch of the pass begins."""
        self.executor.begin_microbatch(self.first + index)

    def end_microbatch(self) -> None:
        """Nothing to add: the schedule holds it."""


@dataclass(eq=False)
class Replay(Composition):
    """A step function on its schedule. It is kept from step to step, and so are the trees that it hands out."""

    ready: Any = None
    executor: Any = None
    at: int = 0
    ran: list[PassResult] = field(default_factory=list)
    dead: list[Tensor] = field(default_factory=list)
    scales: dict[int, float] = field(default_factory=dict)
    banks: dict[int, Bank] = field(default_factory=dict)
    givens: dict[int, StateParams] = field(default_factory=dict)
    slots: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    placed: set[int] = field(default_factory=set)
    marks: Marks = field(default_factory=Marks)

    @property
    def step(self) -> Assembled:
        """The step."""
        step: Assembled = self.ready
        return step

    def begin(self, states: Sequence[Any], executor: Scheduled) -> None:
        """Begin a step."""
        self.states, self.executor = states, executor
        self._clear()
        for held in (self.dead, self.numbers, self.scales, self.complete, self.read, self.placed, self.marks):
            held.clear()
        self.at = 0
        self.restart()

    def end(self) -> None:
        """The step is over: let go of what it was given. Trees that somebody keeps are not handed out again."""
        self.states, self.executor, self.over = (), None, True
        for flats in (self.banks, self.givens):
            for number in [number for number, flat in flats.items() if flat.kept]:
                flats.pop(number).over = True
        self._clear()

    def _clear(self) -> None:
        for held in (self.slots, self.versions, self.ran):
            held.clear()

    # -- parts --------------------------------------------------------------------------------------------------------

    def given(self, number: int) -> StateParams:
        """The parameters of a state: one tree for all steps."""
        if number not in self.givens:
            self.givens[number] = super().given(number)
        return self.givens[number]

    def given_chunks(self, state: int) -> Mapping[int, Tensor]:
        """The shards of the parameters of a state."""
        if state not in self.slots:
            shards = self.states[state].shards()
            groups = self.states[state].plan.groups
            self.slots[state] = {group.id: values_of(group, shards[group.id].param) for group in groups}
        return self.slots[state]

    def scheduled(self, part: Any, batch: Any) -> bool:
        """Tell whether it was a pass when it was traced."""
        known = self.step.recorded.derivatives
        if self.derivatives > len(known):
            raise Mispredicted("the step function takes more derivatives than when it was traced")
        return known[self.derivatives - 1]

    def run_pass(self, spec: PassSpec, number: int, version: int, batch: Any) -> tuple[torch.dtype, Any]:
        """Run the pass on its part of the schedule."""
        stage = self._due(RecordedPass)
        if stage.spec is not spec or stage.version != version or stage.key != signature(batch):
            raise Mispredicted("another pass of the step function is due, or its batch has another structure")
        self._forget()
        check_device(batch, spec.plan.mesh.device)
        parts = microbatches(batch, spec.accumulate, spec.plan.batch)
        if spec.train:
            check_detached(batch)
        if spec.train and not stage.found.weighted:
            check_even(batch, spec.accumulate)
        measured = self._microbatches(spec, number, stage, parts)
        self.ran.append(measured)
        aux = marked(measured.aux) if spec.train else measured.aux[0]
        dtype = measured.losses[0][0].dtype if spec.train else torch.float32
        return dtype, aux

    def _microbatches(self, spec: PassSpec, number: int, stage: RecordedPass, parts: Sequence[Any]) -> PassResult:
        """Return what a pass comes to."""
        prepared, executor, scale = self.step.passes[number], self.executor, self._loss_scale(spec, stage.version)
        readable, outside = self.step.readable(number), stage.found.program.reads[ROOT].__contains__
        view = PassExecutor(executor, self.step.first[number], executor.reach, executor.settle, readable, outside)
        measured = Passes(spec.fn, spec.train, False, spec.divisor).run(prepared.engine, view, parts, scale)
        if spec.train:
            prepared.actions.gradients.fill()
        if spec.train and measured.weighted is not stage.found.weighted:
            raise Mispredicted("the loss of a pass changed between a mean and an fs.Mean")
        aux = [*map(as_means, measured.aux)]
        if fingerprint(aux[0]) != stage.named:
            raise Mispredicted("a pass returned other auxiliary means than when it was traced")
        return measured._replace(aux=aux, divided=spec.divisor / scale)

    def _loss_scale(self, spec: PassSpec, version: int) -> float:
        """Return the factor of a pass's loss: the scale of the state that it reads, or else of the first one."""
        if spec.loss_scale is None:
            return 1.0
        origin = self.step.recorded.versions[version][1]
        return float((self.states[origin or 0].scale or spec.loss_scale.start()).value)

    def bank(self, form: FlatForm, number: int) -> Bank:
        """The gradients of a pass: one tree for all steps."""
        if number not in self.banks:
            memory = self.step.programs[number].memory
            self.banks[number] = Bank(self, form, memory.homes | form.zero_chunks(), number, memory.passing)
        return self.banks[number]

    def reach_local(self, what: str, number: int) -> None:
        """Come to the next point between passes."""
        if self._due(RecordedLocal) != RecordedLocal(what, number):
            raise Mispredicted("the code between passes reads other shards than when it was traced")
        self._forget()
        self.executor.microbatch = 0
        self.executor.reach(LOCAL, "", self.locals)
        for group in self.step.stages.freed[self.locals]:
            entry = self.step.table.entries[group]
            bank = self.banks[entry.bank or 0]
            if entry.group in bank.passing:
                self.dead.append(bank.held[entry.group])
        self.locals += 1

    def _forget(self) -> None:
        """Let go of gradients that nobody reads any more."""
        if self.dead and not self.read:
            for chunk in self.dead:
                deallocate(chunk)
            self.dead.clear()

    def result(self, returned: Any) -> FunctionResult:
        """Return what the function returned, taken apart, if the function has done what the schedule holds."""
        found = super().result(returned)
        due, made = self.step.recorded.updates, recorded_updates(found)
        if self.at < len(self.step.recorded.stages):
            raise Mispredicted("the step function makes fewer passes, or reads fewer shards, than when it was traced")
        if len(due) != len(made) or not all(map(RecordedUpdate.like, due, made)):
            raise Mispredicted("the step function makes other updates than when it was traced")
        return found

    def _due(self, kind: Any) -> Any:
        stages = self.step.recorded.stages
        if self.at >= len(stages) or not isinstance(stages[self.at], kind):
            raise Mispredicted("the step function makes other passes, or reads other shards, than when it was traced")
        self.at += 1
        return stages[self.at - 1]

    def settle_bank(self, bank: Bank) -> None:
        """Make gradients those of the global mean, in place, once those in host memory are there."""
        self.step.passes[bank.number].actions.gradients.arrive()
        ran = self.ran[bank.number]
        scale = self.scale(bank.number, self._joint(bank.form.plan, pair(ran.losses))[1] if ran.weighted else 0.0)
        if scale != 1.0:
            for group in bank.form.groups:
                if group.trainable:
                    bank.held[group.id].mul_(scale)
        self.scales[bank.number] = 1.0

    def scale(self, number: int, count: float) -> float:
        """Return what sums of gradients of a pass are multiplied by to become those of the mean.

        Args:
            number: of the pass.
            count: of its elements, over all ranks.
        """
        if number in self.scales:
            return self.scales[number]
        ran, spec = self.ran[number], self.step.recorded.passes[number].spec
        copies = spec.plan.mesh.size // spec.plan.data_size
        return mean_scale(count if ran.weighted else None, ran.divided, spec.parts, copies)

    def place(self, version: int, source: RunningFlat) -> None:
        """Let passes read parameters that the step has made."""
        versions = self.step.recorded.versions
        plan, given = versions[version] if version < len(versions) else (None, None)
        # The memory of a state that was given is bound already, and gathers of it may be on their way.
        if (
            plan is None
            or given is not None
            or plan is not self.versions[version].plan
            or self.step.recorded.bases[version] != self.versions[version].base
        ):
            raise Mispredicted("the step function makes other parameters than when it was traced")
        self._bind(version, Shards([Shard(source.held[group.id].detach(), {}) for group in plan.groups]))

    def _bind(self, version: int, shards: Shards) -> None:
        for actions in self.step.of_version(version):
            actions.start(shards, None)
        self.placed.add(version)

    def stand_in(self) -> None:
        """Let other ranks gather zeros where this one, which has failed, makes no parameters."""
        for version, (plan, origin) in enumerate(self.step.recorded.versions):
            if origin is None and version not in self.placed:
                spaces = [memory_space(group.kinds.param, plan.mesh) for group in plan.groups]
                pairs = zip(spaces, plan.groups, strict=True)
                made = [Shard(space.zeros(group.chunk, group.dtype), {}) for space, group in pairs]
                self._bind(version, Shards(made))

    def updated(self, updated: Updated, before: RunningMemory) -> Any:
        """Copies of shards, updated."""
        if updated.part.every == 1:
            self._mark("gradients", updated.grads)
        told, part = told_rate(updated.lr), updated.part
        summed = self._summed(part.plan, Reading(told, list), squares(self._rule_norms(updated)))
        check_rates(updated, summed[: len(told)])
        found = summed[len(told) :]
        for at in range(len(part.norms.names) + 1):
            self.numbers["norm", updated, at] = part.norm(updated.state, found, at)
        part.check_here(updated.state, updated.grads, self.numbers["norm", updated, 0])
        shards = self.shards_of(before).clone()
        pending = part.pending(updated.state, updated.grads, part.norms.clipped(found), 1.0, updated.lr)
        pending.detach()  # the function may read the gradients again, and the update spends them
        pending.finish(shards)
        for group in partly_updated(part.chosen):
            layout = part.plan.groups[group]
            fetch(shards[group], Ranks(part.plan.mesh, layout.opt_axes), layout.wires.get("update_gather"))
        return shards

    def _rule_norms(self, updated: Updated) -> list[RuleNorms]:
        """The norms of this rank's gradients of an update, with what calls before have carried."""
        part = updated.part
        if part.every > 1 and ("carried", updated) not in self.complete:
            self.complete.add(("carried", updated))
            self._mark("gradients", updated.grads)
            part.collect(updated.state, updated.grads, self.shards_of(updated.before))
        found: list[RuleNorms] = part.rule_norms(updated.grads)
        return found

    def shards_of(self, memory: RunningMemory) -> Shards:
        """The shards of a state of the step that has no update waiting."""
        made = memory.shards_made
        found: Shards = self.states[memory.origin].shards() if made is None else made
        return found

    # -- numbers ------------------------------------------------------------------------------------------------------

    def number_tensor(self, number: float, dtype: torch.dtype) -> Tensor:
        """A number as a tensor."""
        return torch.tensor(number, dtype=dtype, device="cpu")

    def exchanged(self, value: Number) -> float:
        """A number, by an exchange of its own."""
        if value.kind == "norm":
            part, found = value.of.part, self._summed(value.of.part.plan, squares(self._rule_norms(value.of)))
            norm: float = part.norm(value.of.state, found, value.at)
            return norm
        plan, ran = self.step.recorded.passes[value.of].spec.plan, self.ran[value.of]
        numbers = pair(ran.losses) if value.kind == "loss" else mean_pairs(ran.aux)[value.at]
        return quotient(*self._joint(plan, numbers))

    def own_loss(self, number: int) -> float:
        """The loss of a pass on this rank alone."""
        ((total, count),) = answers([pair(self.ran[number].losses)])
        return total / count if count else 0.0

    def origin(self, number: int) -> str:
        """Say where numbers of a pass stopped being finite on this rank; empty if nobody has looked."""
        step: Assembled = self.ready
        return step.programs[number].origin

    def _joint(self, plan: Plan, numbers: Reading) -> tuple[float, float]:
        """A total and a count, summed over all ranks.

        Raises:
            LossError: a rank's count is negative; on all ranks alike.
        """
        total, count = self._summed(plan, numbers)
        if count < 0:
            ((_, mine),) = answers([numbers])
            check_counts([[-below for (below,) in self.meet(plan.mesh, [int(mine < 0)])]])
        return total, count

    def _summed(self, plan: Plan, *readings: Reading) -> list[float]:
        """Numbers, summed over all ranks: equal on all of them."""
        values = [number for each in answers(readings) for number in each]
        if plan.mesh.size == 1:
            return values
        row = torch.tensor(values, dtype=torch.float64, device="cpu").to(plan.mesh.device)
        summed: list[float] = sum_all(Ranks(plan.mesh, plan.mesh.axis_names), row)().tolist()
        return summed

    def differentiate(self, equal: Equal) -> None:
        """Nothing to add: ranks have compared it at the beginning of the step."""

    def meet(self, mesh: Mesh, row: Sequence[int]) -> list[list[int]]:
        """The numbers of each rank of a mesh, by a collective of the code between passes."""
        if mesh.size == 1:
            return [[*row]]
        rows: list[list[int]] = gather(Ranks(mesh, mesh.axis_names), torch.tensor(row, device=mesh.device))().tolist()
        return rows

    def tally(self, updates: Sequence[Updated], values: PlainValues) -> tuple[list[float], list[float], PlainTold]:
        """The numbers of this rank that are summed, as ``Numbers`` reads them; marks of copies; and plain values."""
        readings: list[Reading] = []
        for ran in self.ran:
            readings += [pair(ran.losses), *mean_pairs(ran.aux)]
        for updated in updates:
            if isinstance(updated.grads, Bank):  # what lies in host memory must be there
                self.step.passes[updated.grads.number].actions.gradients.arrive()
            if updated.part.every == 1:
                self._mark("gradients", updated.grads)
            readings += [Reading(told_rate(updated.lr), list), squares(self._rule_norms(updated))]
        marks = Reading(self.marks.values(self.step.copied), list)
        *summed, copies, told = answers([*readings, marks, plain(values)])
        return [number for each in summed for number in each], copies, told

    def replaced(self, memory: RunningMemory, params: Any) -> RunningMemory:
        """A state of this step with other parameters, of which ranks compare copies."""
        made = super().replaced(memory, params)
        self._mark("parameters", made.source)
        return made

    def _mark(self, what: str, flat: Any) -> None:
        """Note copies, unless a reduction made them, or they were given."""
        if not isinstance(flat, Bank | StateParams):
            self.marks.note(what, flat)
