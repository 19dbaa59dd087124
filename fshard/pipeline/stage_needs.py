"""The needs of the stages of one rank, read off a run of them on fake tensors.

One microbatch goes through the stages of the rank, as in a step: the same code runs, what other stages compute is
received, and what they need is sent, to nowhere. So recomputed code between units, received values and gradients that
wait are in it. Values without data, which stand for what other stages compute, take no memory in a step, and are
followed here to be left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import RematError
from fshard.pipeline.mail import Mail
from fshard.pipeline.rank_program import RankProgram
from fshard.pipeline.stage_engine import StageEngine
from fshard.pipeline.staged_passes import StagedPasses
from fshard.pipeline.staged_trace import StagedProgram
from fshard.runtime.engine.activations import Activations
from fshard.runtime.engine.batch import faked
from fshard.runtime.engine.engine import Traits
from fshard.runtime.engine.program_mode import ProgramMode
from fshard.runtime.engine.remat_rules import NO_REMAT, Remat
from fshard.runtime.execution.trace_program import as_fake, fake_leaves, traceable, without_data
from fshard.runtime.memory.slots import storage_of
from fshard.schedule.footprint import Need
from fshard.schedule.ops import ROOT
from fshard.sharding.mesh import Mesh
from fshard.sharding.plan import Plan

Key = tuple[str, str, int]
"""A compute op of a microbatch: its kind, its unit and the number of the call."""


class StageNeeds(NamedTuple):
    """The needs of the stages of a rank.

    Attributes:
        needs: of the compute ops of one microbatch, in their order.
        flops: floating-point operations of one microbatch, without what is computed again.
    """

    needs: tuple[Need, ...]
    flops: int


def stage_needs(
    fn: Callable[..., Any], staged: StagedProgram, rank: RankProgram, plan: Plan, batch: Any, train: bool, remat: Remat
) -> StageNeeds:
    """Run the stages of a rank on fake tensors, and note what they need.

    Args:
        fn: the loss function, or for evaluation any function.
        staged: the program, cut into stages.
        rank: the rank's part of it.
        plan: the plan of what the rank holds.
        batch: a microbatch.
        train: whether there are gradients.
        remat: which units are computed again in their backward.
    """
    plan = traceable(plan)
    try:
        return _measured(fn, staged, rank, plan, batch, train, remat)
    except RematError:  # of a unit that the eager engine cannot compute again; a graph of it may
        return _measured(fn, staged, rank, plan, batch, train, NO_REMAT)


def _measured(
    fn: Callable[..., Any], staged: StagedProgram, rank: RankProgram, plan: Plan, batch: Any, train: bool, remat: Remat
) -> StageNeeds:
    mode, watching = ProgramMode(), list[Activations]()

    def sink(group: int, numbers: list[int], grads: list[Tensor | None]) -> None:
        for activations in watching:
            activations.gradients(grads)

    traits = Traits(rank.program.reads[ROOT], staged.trace.foreign, staged.trace.exact)
    engine = StageEngine(plan, sink, remat, traits, staged, rank.stages)
    fake = faked(batch, lambda x: as_fake(mode, x))
    with mode:
        fake_leaves(engine, plan)
    engine.absent_in(mode)
    held = [x for x in (*tree.leaves(fake), *engine.slots.by_path.values()) if isinstance(x, Tensor)]
    activations = PresentActivations(held, lambda: bool(engine.inside), engine.absent())
    watching.append(activations)
    noting = _Noting(activations, engine, _stages_of(staged, rank))
    turns = tuple([turn for turn in rank.turns if turn[1].microbatch == 0])
    settings, mine = (fn, train, False, 1.0), replace(rank, turns=turns)
    passes = _FakePasses(*settings, staged=staged, rank=mine, mail=_Nowhere(rank, plan.mesh))
    with without_data(batch, mode, activations, plan.mesh, {}):
        ran = passes.run_stages(engine, noting, [fake], 1.0)  # type: ignore[arg-type]
        noting.close()
    del ran
    needs = tuple([noting.needs.get((op.kind, op.target, op.index), Need(0, 0, 0)) for op in rank.program.computes])
    return StageNeeds(needs, sum(need.flops for need in needs) - activations.again)


class _FakePasses(StagedPasses):
    """Passes whose results are fake tensors."""

    def check_result(self, result: Any) -> None:
        """Take any."""


class PresentActivations(Activations):  # type: ignore[no-untyped-call]
    """Follows storages, and leaves out those without data.

    Args:
        known: tensors that are there before.
        inside: whether a unit's function is running.
        absent: tensors without data. What is computed from them has none either.
    """

    def __init__(self, known: list[Tensor], inside: Callable[[], bool], absent: Iterable[Tensor]) -> None:
        super().__init__(known, inside)
        self.missing = set[int]()
        self.miss(absent)

    def miss(self, tensors: Iterable[Tensor]) -> None:
        """These have no data."""
        found = [x for x in tensors if x.layout is torch.strided]
        self.know(found)
        self.missing.update(x.untyped_storage()._cdata for x in found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator; note what it made if all that it was given has data."""
        given = (x for x in tree.leaves((args, kwargs or {})) if isinstance(x, Tensor))
        if not any(storage_of(x) in self.missing for x in given):
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        self.miss(x for x in tree.leaves(out) if isinstance(x, Tensor))
        return out


@dataclass
class _Noting:
    """The executor of stages on fake tensors: notes the needs of each compute op, apart for each stage.

    Attributes:
        activations: follow what the ops make.
        engine: runs the units.
        stages: the stage of each compute op.
        needs: those of the ops that are over.
    """

    activations: Activations
    engine: StageEngine
    stages: Mapping[Key, int]
    needs: dict[Key, Need] = field(default_factory=dict)
    now: Key | None = None
    live: int = 0
    own: dict[int, int] = field(default_factory=dict)  # bytes of each stage
    shared: dict[int, int] = field(default_factory=dict)  # those of them that are gradients on leaves

    def before(self, kind: str, unit: str, index: int) -> None:
        """An op is next: what happens from here on is its own."""
        self._turn((kind, unit, index))

    def reach(self, kind: str, unit: str, index: int) -> None:
        """An op begins."""
        self._turn((kind, unit, index))

    def close(self) -> None:
        """The last op is over."""
        self._turn(None)

    def begin_microbatch(self, index: int) -> None:
        """There is one."""

    def settle(self) -> None:
        """Nothing to run."""

    def readable(self, groups: Any) -> bool:
        """Fake leaves are always there."""
        return True

    def outside(self, group: int) -> bool:
        """It was judged when the program was traced."""
        return True

    def _turn(self, key: Key | None) -> None:
        if key == self.now:
            return
        found = self.activations.take()
        if self.now is not None:
            self._note(self.now, found)
        self.now, self.live = key, found.after

    def _note(self, key: Key, found: Need) -> None:
        """Tell the needs of an op from those of other stages."""
        kind, unit, _ = key
        if (kind, unit) == ("backward", ROOT):
            self.needs[key] = replace(found, part=-1)
            return
        stage = self.stages[key]
        own, graded = self.own.get(stage, 0), self._graded()
        others = self.live - own
        self.own[stage] = found.after - others
        self.shared[stage] = self.shared.get(stage, 0) + graded - sum(self.shared.values())
        peak, bare = found.peak - others, found.bare - others
        self.needs[key] = replace(
            found, peak=peak, bare=bare, after=self.own[stage], part=stage, shared=self.shared[stage]
        )

    def _graded(self) -> int:
        """Bytes of the gradients that wait on leaves outside of units."""
        held = self.engine.slots.by_path
        outside = {path for stage in self.engine.staged.outside for path in stage if path in held}
        return sum(grad.untyped_storage().nbytes() for path in outside if (grad := held[path].grad) is not None)


class _Nowhere(Mail):
    """Mail of a run on fake tensors: what is sent goes nowhere, and what is received comes from nowhere."""

    def __init__(self, rank: RankProgram, mesh: Mesh) -> None:
        super().__init__(mesh, "", rank.messages, ())
        self.outbox, self.inbox = _Outbox(), _Inbox(rank, mesh)


class _Outbox(dict[tuple[str, int], Tensor]):
    """Keeps nothing."""

    def __setitem__(self, key: tuple[str, int], value: Tensor) -> None:
        """Send a value."""


class _Inbox(dict[tuple[str, int], Tensor]):
    """Has whatever is asked for."""

    def __init__(self, rank: RankProgram, mesh: Mesh) -> None:
        super().__init__()
        self.messages, self.device = rank.messages, mesh.device

    def pop(self, key: tuple[str, int]) -> Tensor:  # type: ignore[override]
        """A value that arrives."""
        return self.messages[key[0]].edge.empty(self.device)


def _stages_of(staged: StagedProgram, rank: RankProgram) -> dict[Key, int]:
    """The stage of each compute op of a rank."""
    stage_of = dict(zip(staged.calls, staged.stages, strict=True))
    kinds = ("forward", "backward", "weight")
    found = {(kind, call.unit, call.index): stage_of[call] for call in rank.program.forward for kind in kinds}
    return {("forward", ROOT, 0): rank.stages[0], **found}
