"""Running one stage of a loss function: its own units run, and what other stages compute is received, or absent.

The whole loss function runs on each stage, as it was written. A call of a unit of another stage returns what arrives
over an edge where this stage needs it, and an *absent* value, which has a shape and no data, where it does not. Once
the last unit of a stage has run, the function is left.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard.errors import UnitError
from fshard.model.instance import LeftCall
from fshard.model.leaves import LeafOrder
from fshard.model.unit import Slot, Unit, attach, slot_of
from fshard.pipeline.absent_values import AbsentResults
from fshard.pipeline.parted_backward import PartedBackward
from fshard.pipeline.staged_trace import StagedProgram
from fshard.runtime.engine.engine import Engine, Executor, Sink, Traits
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.engine.remat_rules import Remat, reentrant_refused
from fshard.runtime.engine.units import Called, bare
from fshard.schedule.ops import ROOT, Call
from fshard.sharding.plan import Plan
from fshard.torch_internals import FakeTensorMode

Received = Mapping[tuple[int, int], Tensor]
"""Values of other stages, by the number of the call and that of the output."""

Keep = Callable[[tuple[int, int], Tensor], None]
"""Takes an output that other stages need, by the numbers of its call and of the output."""


WHOLE, INPUTS, LEAVES = "whole", "of inputs", "of leaves"
"""The part of a backward that runs."""

WHOLE_LATE = "whole, at the time of the second part"
"""The backward of a stage whose inputs want no gradients, in an order of two parts."""


class StageView(NamedTuple):
    """A program as it is seen on one stage.

    Attributes:
        absent: makes and computes the values that have no data.
        values: the results of all calls, without data.
        params: the parameters that the loss function is given: slot leaves, and absent ones of other stages.
    """

    absent: AbsentResults
    values: list[list[Any]]
    params: Any


class FirstPart(NamedTuple):
    """The first part of a backward.

    Attributes:
        due: the calls whose backwards have not begun, in their order.
        graphs: by call, what computes the gradients of leaves of a compiled graph later.
    """

    due: list[Call]
    graphs: dict[tuple[str, int], Callable[[], None]]


class StageOver(LeftCall):
    """The last unit of a stage has run: nothing of the loss function behind it is needed here."""


class StageEngine(Engine):
    """Runs the stages of one rank.

    Args:
        plan: the plan of what this rank holds.
        sink: receives the gradients of leaves.
        remat: which units are computed again in their backward.
        traits: what is known of the program.
        staged: the program, cut into stages.
        stages: the numbers of the stages of this rank.
    """

    def __init__(
        self, plan: Plan, sink: Sink, remat: Remat, traits: Traits, staged: StagedProgram, stages: tuple[int, ...]
    ) -> None:
        super().__init__(plan, sink, remat, traits)
        self.staged, self.stage, self.position = staged, -1, 0
        self.received: Received = {}
        self.keep: Keep = _forget
        self.part, self.unsettled = WHOLE, False
        self.first: FirstPart | None = None
        self._views: dict[int, StageView] = {}
        self.stages = stages
        self.absent_in(FakeTensorMode(allow_non_fake_inputs=True))
        self._real: dict[Unit, tuple[Any, Any]] = {}

    @functools.cached_property
    def _sent(self) -> set[tuple[int, int]]:
        """The outputs that other stages need, by the numbers of call and output."""
        return {(edge.call, edge.output) for edge in self.staged.edges}

    def absent_in(self, mode: FakeTensorMode) -> None:
        """Make the values and leaves of other stages as fake tensors of a mode."""
        self._views = {stage: self._view(stage, AbsentResults(mode)) for stage in self.stages}

    def absent(self) -> Iterator[Tensor]:
        """All values and leaves that have no data."""
        for stage, view in self._views.items():
            yield from (leaf for leaves in view.values for leaf in leaves if isinstance(leaf, Tensor))
            held = self.staged.outside[stage]
            yield from (leaf for path, leaf in tree.paths(view.params) if path not in held)

    def forward(self, fn: Callable[..., Any], batch: Any, stage: int, received: Received, keep: Keep) -> Any:
        """Run a stage on a microbatch.

        Args:
            fn: the loss function.
            batch: the microbatch.
            stage: the number of the stage.
            received: values of other stages, leaves that require grad where their gradient goes back.
            keep: called with each output that other stages need, as soon as it is there.

        Returns:
            What the function returned, on the last stage; else None.
        """
        self.stage, self.position, self.received, self.keep = stage, 0, received, keep
        view = self._views[stage]
        view.absent.begin()
        try:
            return fn(view.params, batch)
        except StageOver:
            return None
        finally:
            self.inside, self.received = "", {}

    def resume(self, executor: Executor) -> None:
        """Begin the backward of a stage that ran before."""
        self.executor, self.inside, self.under_way = executor, "", ""

    def backward(self, run: Callable[[], None], done: Callable[[], None]) -> None:
        """Run the backward of a stage. The gradients of leaves of units go to the sink.

        Args:
            run: computes gradients.
            done: called when they are there.
        """
        with self._differentiating():
            run()
            done()
            self._leave()

    def backward_of_inputs(self, parted: PartedBackward, calls: Sequence[Call], done: Callable[[], None]) -> None:
        """Run the first part of a backward, of the inputs of a stage.

        Args:
            parted: the backward.
            calls: the calls of the stage, in the order of their backwards. Some may not lie between outputs and inputs.
            done: called when the gradients are there.
        """

        def run() -> None:
            parted.of_inputs()
            self._pass_over(None)

        self.part, self.first = INPUTS, FirstPart(list(calls), parted.graphs)
        try:
            self.backward(run, done)
        finally:
            self.part, self.first = WHOLE, None

    def backward_of_leaves(self, parted: PartedBackward, calls: Sequence[Call]) -> None:
        """Run the second part of a backward, of the leaves of a stage, unit by unit.

        Args:
            parted: the backward. Where nothing goes back to other stages, this part is all of it.
            calls: the calls of the stage, in the order of their backwards.
        """
        assert self.executor is not None
        with self._differentiating():
            self.part = LEAVES if parted.inputs else WHOLE_LATE
            try:
                if parted.inputs:
                    self._weigh(parted, calls)
                else:
                    parted.of_leaves()
                    self._leave()
            finally:
                self.part = WHOLE

    def _weigh(self, parted: PartedBackward, calls: Sequence[Call]) -> None:
        """Compute the gradients of the leaves of each call, and of those that no call reads."""
        assert self.executor is not None
        for call in calls:
            sinks = self.units.reads[call.unit].sinks
            self.executor.reach("weight", call.unit, call.index)
            parted.of_leaves({id(leaf): leaf for _, _, leaves in sinks for leaf in leaves}, call)
            for group, numbers, leaves in sinks:
                if not bare(leaves):  # a graph has delivered its gradients
                    self._collect(group, numbers, leaves)
            self.executor.settle()
        parted.of_leaves()

    def _pass_over(self, until: Call | None) -> None:
        """Reach the backwards that stand before one, or all: they have no part that goes back to other stages."""
        assert self.executor is not None
        due = [] if self.first is None else self.first.due
        while due and due[0] != until:
            call = due.pop(0)
            self.executor.reach("backward", call.unit, call.index)
            self.executor.settle()
        del due[:1]

    def end_microbatch(self) -> None:
        """A microbatch is over on this rank: the gradients of leaves outside of units go to the sink."""
        assert self.executor is not None
        self.executor.reach("backward", ROOT, 0)
        for slots in self.slots.groups:
            if slots.group.trainable and not bare(slots.leaves):
                self._collect_outside(slots.group.id, slots.numbers, slots.leaves)

    def enter_backward(self, name: str, index: int) -> bool:
        """The gradient of an output of a unit is complete: its backward begins, and the one before is over."""
        if self.part == LEAVES:  # the hooks have run in the first part
            return True
        if self.part == WHOLE:
            return super().enter_backward(name, index)
        assert self.executor is not None
        self._leave()
        self._pass_over(Call(name, index))
        self.executor.reach("weight" if self.part == WHOLE_LATE else "backward", name, index)
        self.under_way = name
        return True

    def leave_backward(self, shared: bool) -> None:
        """The backward of the unit under way is over, which other ops learn with the next one.

        The gradient of its input may not be complete, and be one that another stage waits for.
        """
        if not shared:
            self.under_way, self.unsettled = "", True

    @property
    def late(self) -> dict[tuple[str, int], Callable[[], None]] | None:
        """Takes what computes gradients of leaves later, by call, in the first part of a backward."""
        return None if self.first is None else self.first.graphs

    def _leave(self) -> None:
        if self.unsettled:
            self.unsettled = False
            assert self.executor is not None
            self.executor.settle()
        elif self.part != INPUTS:
            super()._leave()
        elif self.under_way:
            self.under_way = ""
            assert self.executor is not None
            self.executor.settle()

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        """A backward of this step is under way."""
        self.differentiating = True
        with reentrant_refused():
            yield
        self.differentiating = False

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of this stage; of one of another stage, return what arrived of it."""
        if self.inside or self.executor is None or self.differentiating or self.stage < 0:
            return super().call(unit, self._held(unit, params), args, kwargs)
        number, staged = self.position, self.staged
        self.position = number + 1
        if number >= len(staged.calls):
            raise Mispredicted(f"{unit!r} is called after the last unit of the program")
        if staged.stages[number] != self.stage:
            return self._elsewhere(number)
        result = super().call(unit, self._held(unit, params), args, kwargs)
        if number == staged.last[self.stage] and self.stage + 1 < len(staged.last):
            raise StageOver
        return result

    def _result(self, unit: Unit, called: Called, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit, and keep the outputs that other stages need."""
        number = self.position - 1
        if self.stage >= 0 and (due := self.staged.calls[number]) != Call(called.name, index):
            raise Mispredicted(f"{Call(called.name, index)} is called where {due} is due")
        result = super()._result(unit, called, index, args, kwargs)
        if self.stage >= 0:
            for output, leaf in enumerate(tree.leaves(result)):
                if (number, output) in self._sent:
                    self.keep((number, output), leaf)
            return self._writable(number, result)
        return result

    def _writable(self, number: int, result: Any) -> Any:
        """The result of a call, with copies of what travels and is written to by code between units."""
        if not any(call == number for call, _ in self.staged.written):
            return result
        leaves, spec = tree.flatten(result)
        written = [(number, output) in self.staged.written for output in range(len(leaves))]
        return tree.unflatten(spec, [x.clone() if copied else x for x, copied in zip(leaves, written, strict=True)])

    def _elsewhere(self, number: int) -> Any:
        """The result of a call of another stage."""
        spec, _ = self.staged.results[number]
        absent = self._views[self.stage].values[number]
        leaves = [self.received.get((number, output), leaf) for output, leaf in enumerate(absent)]
        return self._writable(number, tree.unflatten(spec, leaves))

    def _view(self, stage: int, absent: AbsentResults) -> StageView:
        """Make the view of the program on a stage. Values that are no tensors are those of the trace."""
        values = [
            [absent.like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for _, leaves in self.staged.results
        ]
        return StageView(absent, values, self._tree(stage, absent))

    def _held(self, unit: Unit, params: Any) -> Any:
        """The slot leaves in the place of a tree of leaves as code between units sees them."""
        if not unit.name:  # a function, whose trees are made anew
            return tree.mapped(self._slot_leaf, params)
        held = self._real.get(unit)
        if held is None or held[0] is not params:
            held = self._real[unit] = params, tree.mapped(self._slot_leaf, params)
        return held[1]

    def _slot_leaf(self, leaf: Any) -> Any:
        slot = slot_of(leaf)
        if slot is None or slot.engine is not self:
            return leaf
        if slot.path not in self.slots.by_path:
            raise UnitError(f"unit reads {slot.path}, which no stage of this rank holds: name it in fs.Stages(leaves=)")
        return self.slots.by_path[slot.path]

    def _tree(self, stage: int, absent: AbsentResults) -> dict[str, Any]:
        """The parameters that the loss function is given on a stage: slot leaves, and absent ones of other stages."""
        whole = self.plan.whole
        assert whole is not None
        outside = set(self.staged.outside[stage])
        casting = next((slot.casting for slot in map(slot_of, self.slots.by_path.values()) if slot is not None), None)
        leaves = dict[str, Tensor]()
        for path, leaf in whole.leaves.items():
            if path in outside:
                leaves[path] = self.slots.by_path[path]
                continue
            group, _ = whole.places()[path]
            leaves[path] = absent.empty(leaf.compute_shape, group.compute_dtype, self.plan.mesh.device)
            attach(leaves[path], Slot(self, path, casting, leaf.shape))
        order = LeafOrder("params", whole.leaves)
        return order.tree([leaves[path] for path in order.paths])


def _forget(place: tuple[int, int], value: Tensor) -> None:
    """Keep nothing: no stage runs."""
