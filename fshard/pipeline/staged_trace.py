"""Tracing a program for a pipeline: which values go from stage to stage, found by one run on fake tensors.

A value that code between units computes is computed again on each stage that needs it. What it is computed from,
outputs of units of earlier stages, is what travels: an *edge*. So the code between units has no stage of its own, and
needs no graph: each rank runs the loss function as it is, and units of other stages are not called there.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.pipeline import staged_refusals
from fshard.pipeline.value_sources import INNER, NONE, SourceEngine, Sources, SourceWatch, TracedCall
from fshard.runtime.engine.engine import Engine
from fshard.runtime.engine.loss_result import Mean, means_of
from fshard.runtime.engine.plain_values import is_float
from fshard.runtime.engine.program_mode import ProgramMode
from fshard.runtime.engine.remat_rules import NO_REMAT, Remat
from fshard.runtime.execution import ProgramTrace
from fshard.runtime.execution.trace_program import Watched, trace_in
from fshard.schedule.ops import Call
from fshard.sharding.plan import Plan
from fshard.sharding.stage_table import StageTable


class ValueEdge(NamedTuple):
    """An output of a unit that another stage reads.

    Attributes:
        call: the number of the call, among those of the program.
        output: the number of the tensor, among the leaves of its result.
        source: the stage of the call.
        target: the stage that reads it.
        shape: of one microbatch's.
        dtype: of the tensor.
        grad: whether its gradient comes back.
        dims: its dims from the outermost in memory to the innermost, in which it travels.
    """

    call: int
    output: int
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of one message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> Tensor:
        """A tensor for one message, with its dims in memory as it travels."""
        value = torch.empty([self.shape[dim] for dim in self.dims], dtype=self.dtype, device=device)
        return value.permute(sorted(range(len(self.dims)), key=self.dims.__getitem__))


@dataclass(frozen=True)
class StagedProgram:
    """A program cut into stages.

    Attributes:
        trace: the whole program, by the groups of the whole plan.
        stages: the stage of each call, in order.
        edges: the values that go from stage to stage.
        outside: for each stage, the paths of the leaves that its code between units reads.
        results: for each call, the structure of its result and the leaves of that: fake tensors and plain values.
        last: for each stage, the number of its last call.
        result: what the function returned: fake tensors and plain values.
        written: outputs of units, as the numbers of call and output, to which code between units writes in place.
    """

    trace: ProgramTrace
    stages: tuple[int, ...]
    edges: tuple[ValueEdge, ...]
    outside: tuple[tuple[str, ...], ...]
    results: tuple[tuple[Any, Sequence[Any]], ...]
    last: tuple[int, ...]
    result: Any = None
    written: frozenset[tuple[int, int]] = frozenset()

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of units, in order."""
        return self.trace.program.forward


def trace_stages(fn: Any, plan: Plan, batch: Any, train: bool, remat: Remat = NO_REMAT) -> StagedProgram:
    """Trace a function and cut it into the stages of a plan.

    Args:
        fn: the loss function, or for evaluation any function.
        plan: the plan of all stages.
        batch: a microbatch.
        train: which of the two it is.
        remat: which units are computed again in their backward.

    Raises:
        PlanError: the program depends on values of tensors, its calls do not go from stage to stage in order, a stage
            needs a leaf that it does not hold, or activations would wait on the host.
        LossError, UnitError: the function breaks a rule, or whatever it raises itself.
    """
    assert plan.stages is not None
    if remat.offloads and train:
        raise staged_refusals.offloads()
    engines: list[SourceEngine] = []

    def watch(engine: Engine) -> SourceWatch:
        assert isinstance(engine, SourceEngine)
        engines.append(engine)
        engine.watch.leaves_of(engine)
        return engine.watch

    found = trace_in(ProgramMode(), fn, plan, batch, train, remat, Watched(SourceEngine, watch))
    if found is None:
        raise staged_refusals.depends_on_values()
    trace, result = found
    engine = engines[-1]
    numbers = [number for mean in means_of(result) for number in (mean.total, mean.count)]
    remat.check({*trace.program.reads, *(group.unit for group in plan.groups)}, plan.leaves)
    if trace.inner:
        raise staged_refusals.differentiates_units(sorted(trace.inner))
    stages = call_stages(
        trace.program.forward, {name: each.paths for name, each in engine.units.reads.items()}, plan.stages
    )
    staged = _cut(trace, stages, engine.records, engine.watch.of((result, numbers)), plan.stages)
    return replace(staged, result=result, written=_written(staged, engine.watch))


NOTHING = object()
"""The place of a value that only the last stage has."""


def told_values(values: Any) -> Any:
    """The auxiliary values that ranks without the last stage learn: means and plain floats, with zeros in their place.

    What is told of all ranks is a mean over those that hold the last stage, so zeros with a count of 0 leave it as it
    is. Other values are left out; ``NOTHING`` if nothing is left.
    """
    if isinstance(values, Mapping):
        found = {key: told for key, value in values.items() if (told := told_values(value)) is not NOTHING}
        return found if found or not values else NOTHING
    return _told(values)


def told_leaves(values: Any) -> list[Any]:
    """The same of the leaves of any tree, without what is left out."""
    return [told for leaf in tree.leaves(values) if (told := _told(leaf)) is not NOTHING]


def _told(value: Any) -> Any:
    if isinstance(value, Mean):
        return Mean(torch.zeros((), dtype=value.total.dtype, device="cpu"), 0.0)
    if is_float(value):
        return torch.zeros((), dtype=value.dtype, device="cpu") if isinstance(value, Tensor) else 0.0
    return NOTHING


def call_stages(calls: Sequence[Call], reads: Mapping[str, Sequence[str]], table: StageTable) -> tuple[int, ...]:
    """Find the stage of each call: that of its unit, or for a function the next one that holds all that it reads.

    A call that reads no leaf is on the stage of the call before it.

    Args:
        calls: in order.
        reads: the paths of the leaves that each unit reads.
        table: the stages of a plan.

    Raises:
        PlanError: no stage holds all leaves of a call.
    """
    found, now = list[int](), 0
    for call in calls:
        paths = reads[call.unit]
        held = set.intersection(*[set(table.leaves[path]) for path in paths]) if paths else {now}
        if not held:
            raise staged_refusals.scattered_leaves(str(call), {path: table.leaves[path] for path in paths})
        now = table.units.get(call.unit, min([stage for stage in held if stage >= now] or held))
        found.append(now)
    return tuple(found)


def _cut(
    trace: ProgramTrace, stages: tuple[int, ...], records: Sequence[TracedCall], result: Sources, table: StageTable
) -> StagedProgram:
    calls = trace.program.forward
    count = len(table.homes)
    if problems := _unordered(calls, stages, count):
        raise staged_refusals.bad_cut(problems)
    needs: list[Sources] = [NONE] * count
    for stage, record in zip(stages, records, strict=True):
        needs[stage] |= record.needs
    needs[-1] |= result
    _check_results(calls, needs, stages)
    lacking, outside = [], []
    for stage, sources in enumerate(needs):
        paths = sorted(source for source in sources if isinstance(source, str))
        lacking += [(path, stage) for path in paths if stage not in table.leaves[path]]
        outside.append(tuple(paths))
    if lacking:
        raise staged_refusals.lacks_leaves(lacking, table.leaves, outside)
    backward = _backward(calls, stages, trace.program.backward)
    edges = tuple(_edges(needs, stages, records, backward))
    last = [max(number for number, stage in enumerate(stages) if stage == at) for at in range(count)]
    results = tuple([(record.spec, record.leaves) for record in records])
    return StagedProgram(trace, stages, edges, tuple(outside), results, tuple(last))


def _check_results(calls: Sequence[Call], needs: Sequence[Sources], stages: Sequence[int]) -> None:
    """Refuse values from inside of calls, no results of them, that other stages need: those do not call the unit.

    Raises:
        PlanError: there are some.
    """
    places = [(at, source) for at, sources in enumerate(needs) for source in sources if not isinstance(source, str)]
    found = {call for at, (call, output) in places if output == INNER and stages[call] != at}
    if found:
        raise staged_refusals.beside_results([str(calls[call]) for call in sorted(found)])


def _backward(calls: Sequence[Call], stages: Sequence[int], backward: Sequence[Call]) -> set[int]:
    """The numbers of the calls that have a backward.

    Raises:
        PlanError: there are such calls, and none of the last stage, where the backward begins.
    """
    found, last = {calls.index(call) for call in backward}, max(stages)
    if found and last not in {stages[call] for call in found}:
        raise staged_refusals.idle_last_stage([str(call) for call in calls[-stages.count(last) :]])
    return found


def _written(staged: StagedProgram, watch: SourceWatch) -> frozenset[tuple[int, int]]:
    """The outputs that travel and that code between units writes to.

    Raises:
        PlanError: such an output shares its memory with others, which a rank that receives it does not have, or is a
            view, of which autograd loses sight when it is written to.
    """
    sent = {(edge.call, edge.output) for edge in staged.edges}
    found = [places for places in sorted(watch.written) if not sent.isdisjoint(places)]
    backward = set(staged.trace.program.backward)
    if shared := [
        places
        for places in found
        if len(places) > 1 or _is_trained(staged, *places[0]) and staged.calls[places[0][0]] not in backward
    ]:
        raise staged_refusals.writes_shared([(str(staged.calls[call]), output) for call, output in shared[0]])
    return frozenset([output for places in found for output in places])


def _is_trained(staged: StagedProgram, call: int, output: int) -> bool:
    """Tell whether an output requires grad."""
    leaf = staged.results[call][1][output]
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _unordered(calls: Sequence[Call], stages: Sequence[int], count: int) -> list[str]:
    """List what is wrong with the order of calls."""
    found = [
        f"{calls[at]} of stage {stages[at]} is called after {calls[at - 1]} of stage {stages[at - 1]}"
        for at in range(1, len(calls))
        if stages[at] < stages[at - 1]
    ]
    return found + [f"no unit of stage {stage} is called" for stage in range(count) if stage not in stages]


def _edges(
    needs: Sequence[Sources], stages: Sequence[int], records: Sequence[TracedCall], backward: Set[int]
) -> list[ValueEdge]:
    """The outputs of calls that other stages need, in the order of calls; ``backward`` are calls that have one."""
    found, returning = [], {stages[call] for call in backward}
    for target, sources in enumerate(needs):
        for source in sources:
            if isinstance(source, str) or stages[source[0]] == target:  # also one inside of a call of this stage
                continue
            call, output = source
            leaf = records[call].leaves[output]
            grad = leaf.requires_grad and call in backward and target in returning
            ends, dims = (call, output, stages[call], target), _dims(leaf)
            found.append(ValueEdge(*ends, tuple(leaf.shape), leaf.dtype, grad, dims))
    return sorted(found, key=lambda edge: edge[:4])


def _dims(value: Tensor) -> tuple[int, ...]:
    """The dims of a tensor from the outermost in memory to the innermost."""
    strides = value.stride()
    return tuple(sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim)))
