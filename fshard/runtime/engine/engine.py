"""The engine: what a unit's call does while a step runs.

Units run on slot leaves in one ordinary autograd graph. Between a unit's forward and its backward its slots may hold
other groups: the leaves keep their addresses, so once a group is gathered again everything the graph saved of it is
valid again. What is left to do is to know, inside the backward, which unit's part of the graph comes next. Autograd
runs ready nodes latest first, so a unit's backward begins when the gradient of one of its outputs is complete, and is
over before anything that ran before the unit is differentiated. A hook on each output marks that point: there the
gradients of the unit before are moved from its leaves to the flat gradients, and the executor is told where the
program is. Compared with cutting the graph at every unit by a custom autograd function, this costs a tenth.

The engine knows neither schedule nor communication. It tells an *executor* which compute op it has come to
(``reach``), and the executor sees to it that everything that stands before that op has been done. Three executors
exist: one runs a schedule, one gathers on demand, and one, on fake tensors, only writes down what it sees.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import LossError, UnitError, stopped_by_program, written_data
from fshard.model.precision import note_dtypes
from fshard.model.remat_function import exact
from fshard.model.unit import Unit
from fshard.runtime.engine.batch import BatchWatch
from fshard.runtime.engine.hosted_activations import HostedKey, hosting
from fshard.runtime.engine.proxies import Mispredicted, Parameters, foreign_params
from fshard.runtime.engine.remat_rules import NO_REMAT, Remat, reentrant_refused, unsaved
from fshard.runtime.engine.saved_hooks import without_parameters
from fshard.runtime.engine.units import GRAD, VERSION, Called, UnitReads, Units, bare, tensors_in
from fshard.runtime.graphs import Compiled
from fshard.runtime.memory import Slots
from fshard.runtime.memory.slots import storage_of
from fshard.sharding.owners import ROOT
from fshard.sharding.plan import Plan
from fshard.torch_internals import peek_interpreter_stack, saved_tensors_hooks

Sink = Callable[[int, list[int], list[Tensor | None]], None]
"""Receives gradients: ``(group id, leaf numbers, gradients)``; a None gradient is zero."""


class Executor(Protocol):
    """A listener whom the engine tells where the program is."""

    def reach(self, kind: str, unit: str, index: int) -> None:
        """The program is at this compute op: whatever must precede it is done on return."""

    def settle(self) -> None:
        """The compute op is over: start what can run beside the code that follows."""

    def readable(self, groups: Sequence[int]) -> bool:
        """Tell whether all of these groups can be read now."""

    def outside(self, group: int) -> bool:
        """Tell whether code outside of units may read this group."""


class Traits(NamedTuple):
    """Traits of a program that are known.

    Attributes:
        root: ids of the groups that code outside of units reads; None if it may read all.
        foreign: whether the loss may depend on tensors that require grad and are no parameters.
        exact: whether the loss takes derivatives that PyTorch gets wrong; None if nobody knows.
    """

    root: Sequence[int] | None = None
    foreign: bool = True
    exact: bool | None = None


UNKNOWN = Traits()


class Engine:
    """Runs a program's units on slots. One is made for each distinct program of a step.

    Args:
        plan: the plan.
        sink: receives the gradients of leaves.
        remat: which units are computed again in their backward.
        traits: what is known of the program.

    Attributes:
        inside: the unit whose function is running, if one is.
        passed: the tensors among its arguments.
        inner: the units that the program has differentiated itself.
        graphs: what runs units as compiled graphs; None if nothing does.
        exact: whether the loss has taken derivatives that PyTorch gets wrong.
    """

    def __init__(self, plan: Plan, sink: Sink, remat: Remat = NO_REMAT, traits: Traits = UNKNOWN) -> None:
        self.plan, self.sink = plan, sink
        self.slots = Slots(plan, self)
        self.parameters = Parameters(plan, self.slots, traits.root)
        self.units = Units(plan, self.slots, remat, self)
        self.traits, self.exact = traits, bool(traits.exact)
        self.executor: Executor | None = None
        self.counts: dict[str, int] = {}
        self.inside = ""
        self.passed: Sequence[Tensor] = ()
        self.differentiating = False
        self.under_way = ""
        self.inner: set[str] = set()
        self.graphs: Compiled | None = None

    @property
    def epoch(self) -> int:
        """Changes whenever leaves have been bound to other memory."""
        return self.slots.epoch

    @property
    def late(self) -> dict[HostedKey, Callable[[], None]] | None:
        """Takes what computes gradients of leaves later, by call, in the first part of a backward."""
        return None

    def start(self, executor: Executor) -> None:
        """Begin a pass of the program: the next calls of units are the first of their name."""
        self.executor = executor
        self.inside, self.differentiating = "", False
        self.under_way = ""
        self.counts.clear()
        self.slots.refresh()

    def stop(self) -> None:
        """The program is over, or has failed: no gradient is left on a leaf, and units can no longer be called."""
        ended, self.executor = self.executor is None, None
        if self.units.activations is not None:
            self.units.activations.stop()
        if not ended and not bare(self.slots.trained):
            for leaf in self.slots.trained:
                leaf.grad = None

    def release(self) -> None:
        """Drop the views of the arena that leaves and graphs hold. The engine cannot be used afterwards."""
        self.slots.release()
        self.graphs = None

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called with slot leaves for parameters. A unit inside a unit is part of the outer one."""
        if self.inside:
            return unit.fn(params, *args, **kwargs)
        executor = self.executor
        if executor is None:
            raise _no_step(unit)
        called = self.units.called(unit, params)
        if self.differentiating:
            return self._again(called, args, kwargs)
        if peek_interpreter_stack() is not None:
            return self._transformed(called, args, kwargs)
        name = called.name
        index = self.counts.get(name, 0)
        self.counts[name] = index + 1
        executor.reach("forward", name, index)
        result = self._result(unit, called, index, args, kwargs)
        executor.settle()
        return result

    def _result(self, unit: Unit, called: Called, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a unit, of its graph if it has one."""
        if self.graphs is not None and not called.stopped:
            leaves, paths = called.leaves, called.reads.paths
            ran, result = self.graphs.call(unit, called.name, index, called.params, leaves, paths, (args, kwargs))
            if ran:
                return result
        name, _, leaves, function, reads, _ = called
        inputs = tensors_in((args, kwargs) if kwargs else args)
        watched = [*inputs, *leaves]
        try:
            versions = list(map(VERSION, watched))
        except RuntimeError:  # tensors of inference mode have none
            watched = [x for x in watched if not x.is_inference()]
            versions = list(map(VERSION, watched))
        self.inside, self.passed = name, inputs
        try:
            if self.units.activations is None and saved_tensors_hooks(False) is None:
                result = function(*args, **kwargs)
            else:
                result = self._hooked((name, index), function, args, kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError) and "in-place operation" in str(error):
                raise _forbidden(unit, called, args, kwargs) from error
            error.add_note(reads.told(name, self.plan))
            note_dtypes(error, name, inputs, leaves)
            raise
        finally:
            self.inside, self.passed = "", ()
        if versions != list(map(VERSION, watched)):
            raise reads.written(name, watched, versions)
        self._mark(BackwardMark(self, name, index), reads, tensors_in(result), inputs)
        return result

    def _hooked(self, call: HostedKey, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Return the result of a function under hooks on what autograd saves: a user's, or those that move it."""
        moves = hosting(self.units.activations, call)
        try:
            with moves or without_parameters(self.slots):
                return function(*args, **kwargs)
        except RuntimeError as error:
            if moves is not None and "saved tensor hooks" in str(error):
                raise unsaved(call[0]) from error
            raise

    def _mark(
        self, mark: "BackwardMark", reads: UnitReads, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        storages = self.slots.storages
        for number, out in enumerate(outputs):
            if storage_of(out) in storages:
                raise reads.aliased(mark.name, number)
            if out.requires_grad and not any(map(operator.is_, repeat(out), inputs)):
                _hook(out, mark)

    def differentiate(self, total: Tensor, seed: Tensor) -> None:
        """Run the backward from a loss. The gradients of all leaves go to the sink.

        Raises:
            Mispredicted: code outside of units depends on a group that ``root`` is not known to read.
            LossError: the program has run a backward of its own.
        """
        executor = self.executor
        assert executor is not None
        if not bare(self.slots.trained):
            raise LossError(
                "the loss function called backward() itself, so gradients would count twice: return the loss, and take "
                "gradients inside it with torch.autograd.grad"
            )
        self.differentiating = True
        # Naming the inputs keeps autograd from filling the ``grad`` of other tensors, and costs a tenth of a backward.
        with reentrant_refused():
            torch.autograd.backward([total], [seed], inputs=self.slots.trained if self.traits.foreign else None)
        self._leave()
        executor.reach("backward", ROOT, 0)
        for slots in self.slots.groups:
            if slots.group.trainable and not bare(slots.leaves):
                self._collect_outside(slots.group.id, slots.numbers, slots.leaves)
        self.executor = None  # this pass is over, and no gradient is left on a leaf

    def run(self, fn: Callable[..., Any], batch: Any, train: bool) -> Any:
        """The result of the program, with copies in the place of parameters: their memory goes on to hold others.

        A loss itself stays as it is, since its graph is still needed.
        """
        if self.units.activations is not None:
            self.units.activations.begin(batch)
        params = self.parameters.tree()
        versions = self.parameters.versions()
        watched = BatchWatch(batch, train)
        watch = nullcontext() if self.traits.exact is False else exact()
        with watch as derivatives, without_parameters(self.slots):
            result = fn(params, batch)
        self.exact = self.exact or (derivatives is not None and derivatives.used)
        watched.check()
        self.parameters.check_unwritten(versions)
        if self.traits.exact is None:  # of a program that is not known yet
            if moved := self.slots.moved():
                raise written_data("", moved)
            if train and (stopped := self.slots.stopped()):
                raise stopped_by_program(stopped)
        if not train:
            return tree.mapped(self._lasting, result)
        if isinstance(result, tuple) and len(result) == 2:
            return result[0], tree.mapped(self._lasting, result[1])
        return result

    def _lasting(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and storage_of(leaf) in self.slots.storages:
            return leaf.detach().clone()
        return leaf

    def enter_backward(self, name: str, index: int) -> bool:
        """The gradient of an output of a unit is complete: its backward begins, and the one before is over.

        Returns:
            Whether it is this step's backward. If the program takes a gradient of its own through a unit, it reads the
            unit's leaves like other code outside of units, and this step's backward is still to come.
        """
        if self.executor is None:
            raise UnitError(f"unit {name} is differentiated after its step is over, when its parameters are gone")
        if not self.differentiating:
            self.inner.add(name)
            for group in self.units.reads[name].groups:
                if not self.executor.outside(group):
                    raise Mispredicted(f"the program differentiates unit {name} itself")
            return False
        self._leave()
        self.executor.reach("backward", name, index)
        for group, numbers, leaves in self.units.reads[name].sinks:
            if group not in self.parameters.guarded and not bare(leaves):
                self._collect_outside(group, numbers, leaves)
        self.under_way = name
        return True

    def kept(self, name: str, index: int, saved: list[Any]) -> list[Any]:
        """Values that a graph of a call has saved, or what is kept in the place of those that leave for the host."""
        moves = self.units.activations
        return saved if moves is None or (name, index) not in moves.calls else moves.saved((name, index), saved)

    def leave_backward(self, shared: bool) -> None:
        """The backward of the unit under way is over; with ``shared`` some of its gradients are still on their way."""
        if not shared:
            self.under_way = ""
            assert self.executor is not None
            self.executor.settle()

    def deliver(self, group: int, numbers: list[int], grads: list[Tensor | None]) -> None:
        """Gradients of some leaves of a group that are not on the leaves."""
        self.sink(group, numbers, grads)

    def _leave(self) -> None:
        if self.under_way:
            for sink in self.units.reads[self.under_way].sinks:
                self._collect(*sink)
            self.under_way = ""
            assert self.executor is not None
            self.executor.settle()

    def _collect(self, group: int, numbers: list[int], leaves: list[Tensor]) -> None:
        self.sink(group, numbers, list(map(GRAD, leaves)))
        for leaf in leaves:
            leaf.grad = None

    def _collect_outside(self, group: int, numbers: list[int], leaves: list[Tensor]) -> None:
        assert self.executor is not None
        if not self.executor.outside(group):
            raise Mispredicted(f"code outside of units depends on group {self.plan.groups[group].name}")
        self._collect(group, numbers, leaves)

    def leaf(self, path: str) -> Tensor:
        """Refuse code outside of units that reads a leaf for which a proxy stands."""
        raise foreign_params() if self.executor is None else Mispredicted(f"code outside of units reads {path}")

    def _again(self, called: Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Activation checkpointing around units calls them again inside of the backward.
        if self.executor is None or not self.executor.readable(list(called.reads.groups)):
            raise Mispredicted(f"the program calls unit {called.name} again inside of its backward")
        return called.function(*args, **kwargs)

    def _transformed(self, called: Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A transform of torch.func differentiates the unit when it likes: it is code like any outside of units.
        if self.graphs is not None:
            self.graphs.transformed(called.name)
        if self.executor is None or not all([self.executor.outside(group) for group in called.reads.groups]):
            raise Mispredicted(f"unit {called.name} is called under a transform of torch.func")
        return called.function(*args, **kwargs)


class BackwardMark:
    """The hook on a unit's outputs: the first of their gradients to be complete begins the unit's backward."""

    __slots__ = ("engine", "index", "name", "passed")

    def __init__(self, engine: Engine, name: str, index: int) -> None:
        self.engine, self.name, self.index, self.passed = engine, name, index, False

    def __call__(self, grad: Tensor) -> None:
        """The gradient itself stays as it is."""
        if not self.passed:
            self.passed = self.engine.enter_backward(self.name, self.index)


def _no_step(unit: Unit) -> UnitError:
    """The error of a unit that is called when no step runs."""
    return UnitError(
        f"{unit!r} was called with parameters of a step that is over: use params only inside the loss "
        f"function, and state.params or fs.unshard(state.params, plan) outside"
    )


def _forbidden(unit: Unit, called: Called, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnitError:
    # Autograd refused a write before it happened. A second run, on copies, tells what was to be written.
    given = (called.params, args, kwargs)
    copies = tree.mapped(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, given)
    watched = [x for x in tree.leaves(copies[1:]) if isinstance(x, Tensor)] + tree.leaves(copies[0])
    versions = [x._version for x in watched]
    with torch.no_grad():
        unit.fn(copies[0], *copies[1], **copies[2])
    return called.reads.written(called.name, watched, versions)


def _hook(out: Tensor, mark: BackwardMark) -> None:
    """Let the gradient of a tensor call a mark: ``register_hook``, but for the handle, which takes most of its time."""
    node: Any = out.grad_fn
    if type(out) is not Tensor or node is None or out._backward_hooks is not None:
        out.register_hook(mark)  # type: ignore[no-untyped-call]
        return
    hooks: Any = OrderedDict(((mark, mark),))
    out._backward_hooks = hooks
    node._register_hook_dict(out)
