"""From a program to what runs it: a checked schedule, an engine, and their memory."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fshard.errors import unknown_rates
from fshard.optim.contract import Contract
from fshard.runtime.comm import SingleRankTransport
from fshard.runtime.comm.communicators import Communicators
from fshard.runtime.comm.facts import digest
from fshard.runtime.engine.engine import UNKNOWN, Engine, Sink, Traits
from fshard.runtime.engine.remat import Remat
from fshard.runtime.execution.actions import Actions, make_resident
from fshard.runtime.execution.executor import Route, make_route
from fshard.runtime.execution.trace import Found
from fshard.runtime.execution.update import Gradients
from fshard.runtime.memory.allocation import deallocate
from fshard.runtime.memory.gradients import FlatGradients, GradientBuffers
from fshard.runtime.memory.memory_spaces import memory_space, update_stagings
from fshard.runtime.memory.offload import Offload
from fshard.runtime.memory.optimizer_layout import UpdateSlice, most_bytes
from fshard.runtime.steps.rates import common, measured
from fshard.schedule.auto import Auto, Choice, Rates, Task, choose
from fshard.schedule.build import build
from fshard.schedule.check import check
from fshard.schedule.footprint import Need
from fshard.schedule.infos import group_infos, stage_numel
from fshard.schedule.ops import ROOT, GroupInfo, Op, Program
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.transfers import KINDS
from fshard.sharding.mesh import Axes
from fshard.sharding.plan import Plan

if TYPE_CHECKING:
    from fshard.runtime.graphs.cache import Cache

ALIGN = 256


@dataclass(frozen=True)
class Prepared:
    """A program ready to run. ``schedule`` is None if it is gathered on demand.

    Attributes:
        weighted: whether the loss is an ``fs.Mean``; None if nobody knows yet.
        digest: equal on two ranks if their schedules are, and the axes of their own collectives.
        route: the schedule as it runs.
        communicators: the axes over which the program communicates itself.
    """

    schedule: Schedule | None
    engine: Engine
    actions: Actions
    weighted: bool | None
    digest: int
    route: Route | None
    comms: tuple[Axes, ...] = ()

    def text(self) -> str:
        """What ``digest`` is of, in lines."""
        axes = " and ".join("+".join(axes) for axes in self.comms) or "no axis"
        return f"collectives of the program over {axes}\n{self.schedule}"


@dataclass
class Workshop:
    """Makes and keeps what a step needs: communicators, gradient shards, one arena, and the programs met so far."""

    plan: Plan
    policy: Policy | Auto
    accumulate: int
    train: bool
    poison: bool
    comms: Communicators | None
    choices: dict[str, Choice] = field(default_factory=dict)
    grads: dict[int, Tensor] = field(default_factory=dict)
    parted: dict[int, Tensor] = field(default_factory=dict)
    landed: dict[int, Tensor] = field(default_factory=dict)
    casts: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[int, tuple[Tensor, float]] = field(default_factory=dict)
    programs: dict[Hashable, Prepared] = field(default_factory=dict)
    arena: Tensor | None = None
    cache: "Cache | None" = None
    remat: Remat = field(default_factory=Remat)
    visiting: dict[int, int] = field(default_factory=dict)
    engine: Callable[[Plan, Sink, Remat, Traits], Engine] = Engine

    @functools.cached_property
    def infos(self) -> tuple[GroupInfo, ...]:
        """What schedules know of the groups."""
        return group_infos(self.plan, self.visiting)

    @functools.cached_property
    def offload(self) -> Offload:
        """What copies to and from host memory."""
        return Offload(self.plan.mesh)

    @functools.cached_property
    def reduced(self) -> frozenset[int]:
        """The groups whose gradients are reduced: their memory comes and goes."""
        return frozenset(number for number, info in enumerate(self.infos) if self.train and info.reduced)

    @functools.cached_property
    def host(self) -> frozenset[int]:
        """The groups that are updated on the host, where their gradients stay in memory."""
        return frozenset(group.id for group in self.plan.groups if group.offloaded)

    def gradients(self, update_slices: Mapping[int, tuple[UpdateSlice, ...]], opt: Contract) -> Gradients:
        """What becomes of gradients after a step.

        Args:
            update_slices: what one kernel call can update of each trainable group.
            opt: the optimizer.
        """
        moved = [group for group in self.plan.groups if group.update_staged and group.kinds.moved[1]]
        self.visiting = {group.id: most_bytes(group.owned, self.plan.mesh, opt) for group in moved}
        passing = self.reduced - self.host
        return Gradients(self.grads, update_slices, passing, update_stagings(self.plan), self.host)

    def schedule(self, found: Found) -> Schedule:
        """The checked schedule of a program."""
        if isinstance(self.policy, Auto):
            schedule = self.choice(found).schedule
        else:
            schedule = build(found.program, self.infos, self.policy, self.accumulate, self.train)
        check(schedule)
        return schedule

    def undecided(self, found: Found) -> bool:
        """Whether the policy of a program is still to be chosen, by all ranks together."""
        return isinstance(self.policy, Auto) and found.program.text not in self.choices

    def decide(self, found: Found) -> None:
        """Choose the policy of a program. Collective."""
        assert self.comms is not None and isinstance(self.policy, Auto)
        rates, needs = common(self.comms, measured(self.plan, self.comms, self.policy), found.needs)
        self.choices[found.program.text] = choose(self._task(found.program, needs), self.policy, rates)

    def choice(self, found: Found) -> Choice:
        """What was chosen for a program; before any step, what this rank alone would choose.

        Raises:
            PlanError: nothing was chosen yet, and it is not known what this machine does in a second.
        """
        auto = self.policy
        assert isinstance(auto, Auto)
        if found.program.text in self.choices:
            return self.choices[found.program.text]
        missing = [name for name in ("compute", "wire") if getattr(auto, name) is None]
        if missing:
            raise unknown_rates(missing)
        rates = Rates(float(auto.compute or 0), float(auto.wire or 0), auto.latency)
        return choose(self._task(found.program, found.needs), auto, rates)

    def _task(self, program: Program, needs: tuple[Need, ...]) -> Task:
        full = all(group.reduce_dtype == group.dtype for group in self.plan.groups)
        return Task(program, self.infos, needs, self.accumulate, full)

    def scheduled(self, found: Found) -> Prepared:
        """A program with its schedule, made at the first call."""
        program, weighted, foreign = found.program, found.weighted, found.foreign
        key = (program.text, weighted, foreign, found.inner, found.comms, found.exact)
        if key not in self.programs:
            schedule = self.schedule(found)
            arena = self._arena(schedule.memory.arena_bytes)
            traits = Traits(program.reads[ROOT], foreign, found.exact)
            prepared = self._prepare(schedule, weighted, arena, schedule.memory.offsets, traits)
            own = digest((prepared.digest, found.comms)) if found.comms else prepared.digest
            self.programs[key] = replace(prepared, digest=own, comms=found.comms)
            self._compiled(self.programs[key], found)
        return self.programs[key]

    def _compiled(self, prepared: Prepared, found: Found) -> None:
        if self.cache is None:
            return
        from fshard.runtime.graphs.cache import Graphs  # it imports a compiler's worth of modules

        engine, program = prepared.engine, found.program
        readers: Counter[int] = Counter()
        for unit in (*(call.unit for call in program.backward), ROOT, ROOT):
            readers.update(program.reads[unit])
        trained = [slots for slots in engine.slots.groups if slots.group.trainable]
        grads = {slots.group.id: slots.grads for slots in trained}
        claim = prepared.actions.gradients.claim
        if any(slots.grad is not None and slots.grad.dtype != slots.group.compute_dtype for slots in trained):
            claim = _refuse  # a graph writes in the dtype in which it computes; the sink casts
        engine.graphs = Graphs(
            self.cache, self.plan, engine, claim, grads, readers, found.inner, found.foreign, self.remat
        )

    def on_demand(self) -> Prepared:
        """What runs a program that is not known yet: every group has a place of its own."""
        offsets, end = {}, 0
        for info in self.infos:
            if info.gathered:
                offsets[f"param:{info.name}"], end = end, -(-(end + info.full_bytes) // ALIGN) * ALIGN
        return self._prepare(None, None, self._new_arena(end), offsets)

    def closing(self, microbatch: int) -> list[Op]:
        """The reductions after a backward that ran on demand."""
        infos = [info for info in self.infos if self.train and info.reduced]
        last = microbatch == self.accumulate - 1
        rows = [row for row in KINDS.values() if row.stage == "gradient" and (last or row.each_microbatch)]
        return [
            Op(word, info.name, 0, microbatch if row.each_microbatch else 0)
            for row in rows
            for word in (row.name, row.wait)
            for info in infos
            if info.transfer(row.name)
        ]

    def _prepare(
        self,
        schedule: Schedule | None,
        weighted: bool | None,
        arena: Tensor,
        offsets: Mapping[str, int],
        traits: Traits = UNKNOWN,
    ) -> Prepared:
        assert self.comms is not None
        buffers: dict[int, GradientBuffers] = {}
        gradients = FlatGradients(self.plan, buffers, self.offload, self.carried)
        engine = self.engine(self.plan, gradients.sink, self.remat, traits)
        engine.slots.place(arena, offsets, {g: stage_numel(self.plan, self.plan.groups[g]) for g in self.reduced})
        if self.train:
            for slots in engine.slots.groups:
                if slots.group.trainable and slots.grad is None:
                    slots.bind_grad(self._grad(slots.group.id))
                elif slots.group.trainable:
                    self._grad(slots.group.id)
        self._make_casts()
        for number, home in self.grads.items():
            own = self.landed.get(number, home)
            late = any([transfer.late for transfer in self.infos[number].transfers])
            shard = self.parted.get(number, own)
            buffers[number] = GradientBuffers(engine.slots.groups[number], shard, own, home, late)
        actions = Actions(engine.slots, self.comms, gradients, make_resident(self.casts, self.offload), self.poison)
        if schedule is None:
            return Prepared(None, engine, actions, weighted, 0, None)
        route = make_route(schedule, actions)
        return Prepared(schedule, engine, actions, weighted, int(schedule.hash[:15], 16), route)

    def _make_casts(self) -> None:
        for group in self.plan.groups:
            if group.compute_dtype != group.dtype and group.id not in self.casts:
                place = memory_space(group.kinds.param, self.plan.mesh)
                self.casts[group.id] = place.empty(group.chunk, group.compute_dtype)

    def _grad(self, number: int) -> Tensor:
        group = self.plan.groups[number]
        if number not in self.grads:
            own = torch.zeros(group.owned.chunk, dtype=group.dtype, device=self.plan.mesh.device)
            self.grads[number] = own
            if number in self.reduced:
                deallocate(own)
            if number in self.host:
                pinned = "pinned_host" in (group.kinds.param, group.kinds.opt)
                place = memory_space("pinned_host" if pinned else "unpinned_host", self.plan.mesh)
                self.landed[number], self.grads[number] = own, place.zeros(group.owned.chunk, group.dtype)
            if group.second_scatter:
                self.parted[number] = torch.zeros(group.chunk, dtype=group.dtype, device=self.plan.mesh.device)
                deallocate(self.parted[number])
        return self.grads[number]

    def _arena(self, size: int) -> Tensor:
        if self.arena is None or self.arena.numel() < size:
            # Programs made before hold views of the old arena: they are made again when they come up.
            self.programs.clear()
            self.arena = self._new_arena(size)
        return self.arena

    def _new_arena(self, size: int) -> Tensor:
        arena = torch.empty(size, dtype=torch.uint8, device=self.plan.mesh.device)
        if self.poison:
            arena.fill_(255)  # every floating-point dtype reads all ones as nan
        return arena


def _refuse(groups: Sequence[tuple[int, bool]]) -> bool:
    """Nothing may be written straight into flat gradients."""
    return False


def communicators_of(plan: Plan) -> Communicators | None:
    """The communicators of a plan; None on an abstract mesh of several ranks, which can plan but not run."""
    transport: Any = plan.mesh.transport
    if transport is None and plan.mesh.size == 1:
        transport = SingleRankTransport()
    return Communicators(plan, transport) if transport is not None else None
