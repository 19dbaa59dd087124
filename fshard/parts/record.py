"""Finding out what a step function does: it is run once on fake tensors, and its parts write themselves down."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.collectives.scope import bind
from fshard.optim.contract import LearningRate
from fshard.parts.compose import Composition
from fshard.parts.step_arguments import Arguments, Final, FunctionResult
from fshard.parts.step_values import Bank, Number, RunningFlat, RunningMemory, Updated, memory_of
from fshard.runtime.comm.call_site import line_of
from fshard.runtime.comm.facts import Facts, facts_of
from fshard.runtime.engine.activations import Activations
from fshard.runtime.engine.batch import check_even, faked, microbatches, signature
from fshard.runtime.engine.fake_fallback import needs_values
from fshard.runtime.engine.loss_result import as_means, detached, fingerprint, means_of, read_loss
from fshard.runtime.engine.program_mode import ProgramMode
from fshard.runtime.execution import ProgramTrace, Shard, Shards, partly_updated
from fshard.runtime.execution.trace_program import trace_in, without_data
from fshard.runtime.steps import PassSpec
from fshard.runtime.steps.step_refusals import kind_text
from fshard.schedule.footprint import Need, above
from fshard.schedule.infos import group_infos
from fshard.schedule.ops import GroupInfo
from fshard.sharding.mesh import Axes, Mesh
from fshard.sharding.plan import Plan
from fshard.state.elementwise import ShardArithmetic, unguarded
from fshard.state.equal import Equal
from fshard.state.flat import FlatForm, cut_of_leaf, form_of
from fshard.state.train_state import TrainState
from fshard.transform.tangent_plan import MARK

VALUES = "it asks for values that a trace does not have"


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """A pass of a step function.

    Attributes:
        spec: what it runs.
        version: the number of the parameters that it reads.
        found: its program.
        key: of the batch that it was given.
        named: how many auxiliary means it has, and a hash of their names.
        plain: whether some of these are plain means, of batches that must be of equal sizes on all ranks.
    """

    spec: PassSpec
    version: int
    found: ProgramTrace
    key: Hashable
    named: tuple[int, int]
    plain: bool = False


@dataclass(frozen=True)
class RecordedLocal:
    """The code between passes reads, or has made, something: see ``Composition.reach_local``."""

    what: str
    number: int


@dataclass(frozen=True, eq=False)
class RecordedUpdate:
    """An update that is left to the next step.

    Attributes:
        origin: the number of the state that it updates.
        part: the update.
        bank: the pass of its gradients; None if arithmetic made them, or they are copied.
        fresh: whether it updates the parameters that the step was given, and not those that the step has made of them.
    """

    origin: int
    part: Any
    bank: int | None
    fresh: bool

    def like(self, other: "RecordedUpdate") -> bool:
        """Tell whether another update has this one's place in a schedule, and in the numbers that ranks exchange."""
        mine, theirs = self.part, other.part
        alike = mine is theirs or mine.paths == theirs.paths and mine.norms.sets == theirs.norms.sets
        return alike and (self.origin, self.bank, self.fresh) == (other.origin, other.bank, other.fresh)


@dataclass(frozen=True, eq=False)
class StepRecord:
    """The passes, code and updates of a step function, in order.

    Attributes:
        stages: its passes, and the code between them that reads or makes shards.
        versions: for each version of parameters its plan, and the state that it is of, if the step was given it.
        updates: the updates that are left to the next step.
        axes: those over which the function communicates itself.
        needs: what the compute ops of one microbatch of each pass need, and the code between passes.
        equals: what its parts must have in common on all ranks, and the number of the state that each updates, if any.
        derivatives: for each call of a tool that takes derivatives, in order, whether it is a pass.
        bases: for each version, an earlier one of the same parameters; None for versions without tangents.
    """

    stages: tuple[RecordedPass | RecordedLocal, ...]
    versions: tuple[tuple[Plan, int | None], ...]
    updates: tuple[RecordedUpdate, ...]
    axes: tuple[Axes, ...]
    needs: tuple[Need, ...]
    equals: tuple[tuple[Equal, int | None], ...]
    derivatives: tuple[bool, ...]
    bases: tuple[int | None, ...]

    @functools.cached_property
    def passes(self) -> list[RecordedPass]:
        """Its passes."""
        return [stage for stage in self.stages if isinstance(stage, RecordedPass)]

    @functools.cached_property
    def shared(self) -> list[frozenset[int]]:
        """For each version, the groups that it reads where its base has gathered them."""
        infos = [[*zip(group_infos(plan), plan.compute_dtypes, strict=True)] for plan, _ in self.versions]

        def alike(mine: tuple[GroupInfo, Any], theirs: tuple[GroupInfo, Any]) -> bool:
            (own, dtype), (other, base) = mine, theirs
            same = dtype == base and own.transfer("all_gather") == other.transfer("all_gather")
            return own.gathered and other.gathered and same and not own.name.endswith(MARK)

        return [
            frozenset()
            if base is None
            else frozenset(
                [n for n, (mine, theirs) in enumerate(zip(infos[at], infos[base], strict=False)) if alike(mine, theirs)]
            )
            for at, base in enumerate(self.bases)
        ]

    @functools.cached_property
    def returned(self) -> Facts:
        """The kinds of what its passes return, whose numbers ranks sum."""
        passes = enumerate(self.passes)
        return facts_of({f"pass {n} returns": kind_text(each.found.weighted, *each.named) for n, each in passes})

    def home(self, version: int, group: int) -> int:
        """The version whose gathers a group of a version is read from."""
        base = self.bases[version]
        return base if base is not None and group in self.shared[version] else version

    @functools.cached_property
    def communicates(self) -> list[Axes]:
        """The mesh axes of the collectives that the function and the programs of its passes call."""
        return sorted({axes for each in self.passes for axes in each.found.axes} | {*self.axes})

    @property
    def idle(self) -> tuple[str, ...]:
        """The leaves that its passes differentiate by, and to which none gives a gradient."""
        leaves: dict[tuple[tuple[str, ...], str], bool] = {}  # by the paths of their tree: each model has its own
        for each in self.passes:
            plan, idle = each.spec.plan, each.found.idle or ()
            for path, leaf in plan.leaves.items() if each.spec.train else ():
                if leaf.trainable:
                    key = tuple(plan.leaves), path
                    leaves[key] = leaves.get(key, True) and path in idle
        return tuple([path for (_, path), idle in leaves.items() if idle])


@dataclass(frozen=True)
class Untraced:
    """A step function of which only a real run can tell what it does.

    Attributes:
        why: the reason, to go on after "since".
    """

    why: str


class UntraceablePart(Exception):  # noqa: N818 - not an error: the step runs part by part
    """A part depends on values that a trace does not have."""


@dataclass(eq=False)
class Recording(Composition):
    """A step function on fake tensors."""

    mode: ProgramMode = field(default_factory=ProgramMode)
    stages: list[RecordedPass | RecordedLocal] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    between: Activations = field(default_factory=lambda: Activations([]))  # of the code between passes
    equals: dict[int, tuple[Equal, int | None]] = field(default_factory=dict)
    guard: ShardArithmetic = field(default_factory=lambda: ShardArithmetic(cut_of_leaf))
    foreseen: list[bool] = field(default_factory=list)  # for each call of a tool, whether it is a pass
    traced: tuple[ProgramTrace, Any] | None = None  # the program of the pass that comes next, if it was traced before
    given_fakes: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def hand_out(self, leaf: Tensor, flat: RunningFlat, number: int) -> None:
        """Let the guard follow it."""
        cut = flat.form.cuts[number]
        if cut is not None:
            self.guard.know(leaf, cut)

    def gradient(self, part: Any, params: Any, batch: Any) -> Any:
        """Note what it must have in common on all ranks."""
        self.equals[id(part)] = part.equal, None
        return super().gradient(part, params, batch)

    def update(self, part: Any, state: TrainState, grads: Any, lr: LearningRate) -> Any:
        """Note what it must have in common on all ranks."""
        self.equals[id(part)] = part.equal, memory_of(state, self).origin
        made = super().update(part, state, grads, lr)
        updated = memory_of(made[0], self).source
        if isinstance(updated, Updated) and isinstance(updated.grads, RunningFlat):
            self._hold(updated.grads.form, updated.grads.held)
        return made

    def differentiate(self, equal: Equal) -> None:
        """Note what it must have in common on all ranks. The guard cannot follow shards through transforms."""
        self.equals[id(equal)] = equal, None
        self.guard.leave()

    def _hold(self, form: FlatForm, chunks: Mapping[int, Tensor]) -> None:
        """Let no code write to chunks: passes at one point share what they gather, and updates wait."""
        for group in form.groups:
            self.guard.hold(chunks[group.id], group)

    def given_chunks(self, state: int) -> Mapping[int, Tensor]:
        """Fake shards."""
        if state not in self.given_fakes:
            form = form_of(self.states[state].plan)
            self.given_fakes[state] = self._fake(form)
            self._hold(form, self.given_fakes[state])
        return self.given_fakes[state]

    def _fake(self, form: FlatForm) -> dict[int, Tensor]:
        """Fake shards, which belong to states, or are items of the schedule."""
        with self.between.outside(), self.mode:
            device = form.plan.mesh.device
            chunks = {g.id: torch.empty(g.chunk, dtype=g.dtype, device=device) for g in form.groups}
            self.between.know(chunks.values())
            return chunks

    def scheduled(self, part: Any, batch: Any) -> bool:
        """Trace it. Where that fails, it gathers where units run, and raises what is an error of the loss function."""
        try:
            self.traced = self._trace(part.spec, batch)
        except Exception:
            self.traced = None
        self.foreseen.append(self.traced is not None)
        if self.traced is not None:
            self.equals[id(part)] = part.equal, None
        return self.traced is not None

    def _trace(self, spec: PassSpec, batch: Any) -> tuple[ProgramTrace, Any] | None:
        parts = microbatches(batch, spec.accumulate, spec.plan.batch)
        with self.between.outside(), unguarded():
            return trace_in(self.mode, spec.fn, spec.plan, parts[0], spec.train, spec.remat)

    def run_pass(self, spec: PassSpec, number: int, version: int, batch: Any) -> tuple[torch.dtype, Any]:
        """Trace its function."""
        before = self.between.take()
        traced, self.traced = self.traced or self._trace(spec, batch), None
        if traced is None:
            raise UntraceablePart(f"{VALUES}, in {getattr(spec.fn, '__name__', 'a function')}")
        found, result = traced
        if spec.train and not found.weighted:
            check_even(batch, spec.accumulate)
        values = read_loss(result).aux if spec.train else result
        named = fingerprint(as_means(values))
        plain = named[0] > len(means_of(values))
        self.stages.append(RecordedPass(spec, version, found, signature(batch), named, plain))
        self.needs += above(before, found.needs)
        if not spec.train:
            return torch.float32, result
        loss = read_loss(result)
        with self.mode:
            aux = as_means(tree.mapped(detached, loss.aux)) if loss.aux else {}
            if (many := spec.accumulate) > 1:  # those of all microbatches
                aux = tree.mapped(lambda x: torch.stack([x] * many) if isinstance(x, Tensor) else x, aux)
            return loss.total.dtype, aux

    def bank(self, form: FlatForm, number: int) -> Bank:
        """Fake gradients."""
        return Bank(self, form, self._fake(form), number)

    def reach_local(self, what: str, number: int) -> None:
        """Write it down."""
        self.stages.append(RecordedLocal(what, number))
        self.needs.append(self.between.take())

    def settle_bank(self, bank: Bank) -> None:
        """Counts are summed where the loss is an ``fs.Mean``."""
        if self._pass(bank.number).found.weighted:
            self._foresee(bank.form.plan.mesh)

    def place(self, version: int, source: RunningFlat) -> None:
        """Note that a pass reads it."""
        self._hold(source.form, source.held)

    def updated(self, updated: Updated, before: RunningMemory) -> Any:
        """Fake shards."""
        self._foresee(updated.part.plan.mesh)
        for group in partly_updated(updated.part.chosen):
            self.mode.foresee(updated.part.plan.mesh, updated.part.plan.groups[group].opt_axes)
        for at in range(len(updated.part.norms.names) + 1):
            self.numbers["norm", updated, at] = math.nan
        return self.shards_of(before)

    def shards_of(self, memory: RunningMemory) -> Shards:
        """Fake shards."""
        form = form_of(memory.plan)
        chunks = self._fake(form)
        self._hold(form, chunks)
        return Shards([Shard(chunks[group.id], {}) for group in memory.plan.groups])

    def exchanged(self, value: Number) -> float:
        """Ranks will exchange it."""
        self._foresee((value.of.part if value.kind == "norm" else self._pass(value.of).spec).plan.mesh)
        return math.nan

    def meet(self, mesh: Mesh, row: Sequence[int]) -> list[list[int]]:
        """Ranks will exchange them. Here all have those of this one."""
        self._foresee(mesh)
        return [[*row] for _ in range(mesh.size)]

    def number_tensor(self, number: float, dtype: torch.dtype) -> Tensor:
        """A fake number."""
        with self.mode:
            return torch.empty((), dtype=dtype, device="cpu")

    def _foresee(self, mesh: Mesh) -> None:
        self.mode.foresee(mesh, mesh.axis_names)

    def _pass(self, number: int) -> RecordedPass:
        return [stage for stage in self.stages if isinstance(stage, RecordedPass)][number]

    def recorded(self, result: FunctionResult, axes: Sequence[Axes]) -> StepRecord:
        """Return what the function did."""
        return StepRecord(
            tuple(self.stages),
            tuple([(version.plan, version.given) for version in self.versions]),
            tuple(recorded_updates(result)),
            tuple(axes),
            tuple(self.needs),
            (*self.equals.values(),),
            tuple(self.foreseen),
            tuple([version.base for version in self.versions]),
        )


def record(fn: Callable[..., Any], given: Arguments, plan: Plan) -> StepRecord | Untraced:
    """Return what a step function does with these states and this batch, if a trace can tell.

    Args:
        fn: ``fn(state, batch)``.
        given: its arguments.
        plan: whose data axes are bound.
    """
    recording = Recording(given.states, given.own)
    axes: dict[Axes, None] = {}
    fake = faked(given.opened(), recording.mode.from_tensor)
    recording.between.know(leaf for leaf in tree.leaves(fake) if isinstance(leaf, Tensor))
    for real, leaf in zip(tree.leaves(given.opened()), tree.leaves(fake), strict=True):
        if isinstance(leaf, Tensor):
            recording.guard.know(leaf, cut_of_leaf(real))
    inside = recording.inside(replace(given, batch=fake))
    around = without_data(fake, recording.mode, recording.between, plan.mesh, axes)
    try:
        with around, recording.guard, bind(plan.mesh, plan.data_axes, running=recording):
            result = recording.result(fn(*inside))
        recording.guard.check()
    except Exception as error:
        recording.guard.check()
        if isinstance(error, UntraceablePart):
            return Untraced(str(error))
        if not needs_values(error):
            raise
        line = line_of(error)
        return Untraced(f"{VALUES}, at {line}" if line else VALUES)
    finally:
        recording.over = True
    return recording.recorded(result, [*axes])


def recorded_updates(result: FunctionResult) -> list[RecordedUpdate]:
    """The updates that what a step function returned leaves to the next step."""

    def one(final: Final, updated: Updated) -> RecordedUpdate:
        bank = updated.grads.number if isinstance(updated.grads, Bank) and updated not in result.copied else None
        return RecordedUpdate(final.memory.origin, updated.part, bank, final.memory.shards_made is None)

    return [one(final, each) for final in result.finals for each in final.updates]
