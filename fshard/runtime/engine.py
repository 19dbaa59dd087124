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

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from fshard import tree
from fshard.errors import LossError, UnitError, written_outside
from fshard.model.casting import note_dtypes
from fshard.model.leaves import LeafOrder
from fshard.model.unit import Unit, slot_of
from fshard.runtime.batch import Written
from fshard.runtime.graphs import Compiled
from fshard.runtime.handles import Handle, Mispredicted, make_handle
from fshard.runtime.reads import Reads, bare, prefix
from fshard.runtime.remat import Remat, reentrant_refused
from fshard.runtime.slots import Slots
from fshard.sharding.plan import ROOT, Plan

Called = tuple[str, Any, list[Any], Callable[..., Any]]
"""A unit's call: its name, its parameters, their leaves, and the unit as a function of its other arguments."""

Sink = Callable[[int, list[int], list[Tensor | None]], None]
"""Receives gradients: ``(group id, leaf numbers, gradients)``; a None gradient is zero."""


class Executor(Protocol):
    """What the engine tells where the program is."""

    def reach(self, kind: str, unit: str, index: int) -> None:
        """The program is at this compute op: whatever must precede it is done on return."""

    def settle(self) -> None:
        """The compute op is over: start what can run beside the code that follows."""

    def readable(self, groups: Sequence[int]) -> bool:
        """Whether all of these groups can be read now."""

    def outside(self, group: int) -> bool:
        """Whether code outside of units may read this group."""


class Engine:
    """Runs a program's units on slots. One is made for each distinct program of a step.

    Attributes:
        inside: the unit whose function is running, if one is.
        passed: the tensors among its arguments.
        foreign: whether the loss may depend on tensors that require grad and are no parameters.
        inner: the units that the program has differentiated itself.
        graphs: what runs units as compiled graphs; None if nothing does.
        remat: which units are computed again in their backward.
        exact: whether the loss takes derivatives that PyTorch gets wrong.
        epoch: changes whenever leaves have been bound to other memory.
    """

    def __init__(self, plan: Plan, sink: Sink) -> None:
        self.plan = plan
        self.slots = Slots(plan, self)
        self.layout = LeafOrder("params", plan.leaves)
        self.sink = sink
        self.executor: Executor | None = None
        self.trainable: list[Tensor] = []
        self.reads: dict[str, Reads] = {}
        self.names: dict[tuple[str, tuple[object, ...]], str] = {}
        self.trees: dict[Unit, tuple[Any, Called]] = {}
        self.handed: dict[str, Tensor] = {}
        self.given: list[Tensor] = []
        self.tree: dict[str, Any] = {}
        self.guarded: set[int] = set()
        self.open: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.storages: set[int] = set()
        self.inside = ""
        self.passed: Sequence[Tensor] = ()
        self.differentiating = False
        self.under_way = ""
        self.foreign = True
        self.inner: set[str] = set()
        self.graphs: Compiled | None = None
        self.remat = Remat()
        self.exact = False
        self.epoch = -1

    def start(self, executor: Executor) -> None:
        """Begin a pass of the program: the next calls of units are the first of their name."""
        self.executor = executor
        self.inside, self.differentiating = "", False
        self.under_way = ""
        self.counts.clear()
        self.trainable = self.trainable or self.slots.trained()
        epoch = sum([slots.binds for slots in self.slots.groups])
        if epoch != self.epoch:
            self.epoch, self.storages = epoch, self.slots.storages()

    def stop(self) -> None:
        """The program is over, or has failed: no gradient is left on a leaf, and units can no longer be called."""
        self.executor = None
        for leaf in self.trainable:
            leaf.grad = None

    def params(self) -> dict[str, Any]:
        """The parameter tree that the loss function gets: nested dicts of slot leaves."""
        if not self.given:
            held = self.slots.by_path | self.handed
            self.given = [held[path] for path in self.layout.paths]
            self.open = {path: leaf for path, leaf in held.items() if type(leaf) is not Handle}
            self.tree = {}
        # A loss function may have written to the tree of the step before. Looking takes half the time of making one.
        found = self.layout.read(self.tree)
        if found is None or not all(map(operator.is_, found, self.given)):
            self.tree = self.layout.tree(self.given)
        return self.tree

    def guard(self, root: Sequence[int]) -> None:
        """From now on, hand out handles for all leaves but those of the groups that code outside of units reads."""
        for slots in self.slots.groups:
            if slots.group.id not in root:
                self.guarded.add(slots.group.id)
                for leaf, tensor in zip(slots.group.leaves, slots.leaves, strict=True):
                    slot = slot_of(tensor)
                    assert slot is not None
                    self.handed[leaf.path] = make_handle(slot, tensor, leaf.compute_shape)
        self.given.clear()

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called with slot leaves for parameters. A unit inside a unit is part of the outer one."""
        if self.inside:
            return unit.fn(params, *args, **kwargs)
        executor = self._running(unit)
        name, params, leaves, function = self._identify(unit, params)
        if self.differentiating:
            return self._again(name, function, args, kwargs)
        if peek_interpreter_stack() is not None:
            return self._transformed(name, function, args, kwargs)
        index = self.counts.get(name, 0)
        self.counts[name] = index + 1
        executor.reach("forward", name, index)
        if self.graphs is not None:
            ran, result = self.graphs.call(unit, name, index, params, leaves, self.reads[name].paths, (args, kwargs))
            if ran:
                executor.settle()
                return result
        inputs = _tensors((args, kwargs) if kwargs else args)
        watched = [*inputs, *leaves]
        try:
            versions = [x._version for x in watched]
        except RuntimeError:  # tensors of inference mode have none
            watched = [x for x in watched if not x.is_inference()]
            versions = [x._version for x in watched]
        self.inside, self.passed = name, inputs
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if isinstance(error, RuntimeError) and "in-place operation" in str(error):
                raise self._forbidden(unit, name, params, args, kwargs) from error
            error.add_note(self.reads[name].told(name, self.plan))
            note_dtypes(error, name, inputs, leaves)
            raise
        finally:
            self.inside, self.passed = "", ()
        if versions != [x._version for x in watched]:
            raise self.reads[name].written(name, watched, versions)
        mark = None
        for number, out in enumerate(_tensors(result)):
            if out.untyped_storage()._cdata in self.storages:
                raise self.reads[name].aliased(name, number)
            if out.requires_grad and not any([out is x for x in inputs]):
                mark = mark or Mark(self, name, index)
                out.register_hook(mark)  # type: ignore[no-untyped-call]
        executor.settle()
        return result

    def differentiate(self, total: Tensor, seed: Tensor) -> None:
        """Run the backward from a loss. The gradients of all leaves go to the sink.

        Raises:
            Mispredicted: code outside of units depends on a group that ``root`` is not known to read.
            LossError: the program has run a backward of its own.
        """
        executor = self.executor
        assert executor is not None
        if not bare(self.trainable):
            raise LossError(
                "the loss function called backward() itself, so gradients would count twice: return the loss, and take "
                "gradients inside it with torch.autograd.grad"
            )
        self.differentiating = True
        # Naming the inputs keeps autograd from filling the ``grad`` of other tensors, and costs a tenth of a backward.
        with reentrant_refused():
            torch.autograd.backward([total], [seed], inputs=self.trainable if self.foreign else None)
        self._leave()
        executor.reach("backward", ROOT, 0)
        for slots in self.slots.groups if not bare(self.trainable) else ():
            if slots.group.trainable and not bare(slots.leaves):
                self._collect_outside(slots.group.id, slots.numbers, slots.leaves)

    def run(self, fn: Callable[..., Any], batch: Any, train: bool) -> Any:
        """The result of the program, with copies in the place of parameters: their memory goes on to hold others.

        A loss itself stays as it is, since its graph is still needed.
        """
        params = self.params()
        versions = [leaf._version for leaf in self.open.values()]  # handles cannot be written
        watched = Written(batch, train)
        result = fn(params, batch)
        watched.check()
        if versions != [leaf._version for leaf in self.open.values()]:
            now = zip(self.open.items(), versions, strict=True)
            changed = [path for (path, leaf), version in now if leaf._version != version]
            raise written_outside(changed)
        if not train:
            return tree.map(self._lasting, result)
        if isinstance(result, tuple) and len(result) == 2:
            return result[0], tree.map(self._lasting, result[1])
        return result

    def _lasting(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self.storages:
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
            for group in self.reads[name].groups:
                if not self.executor.outside(group):
                    raise Mispredicted(f"the program differentiates unit {name} itself")
            return False
        self._leave()
        self.executor.reach("backward", name, index)
        for group, numbers, leaves in self.reads[name].sinks:
            if group not in self.guarded and not bare(leaves):
                self._collect_outside(group, numbers, leaves)
        self.under_way = name
        return True

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
            for sink in self.reads[self.under_way].sinks:
                self._collect(*sink)
            self.under_way = ""
            assert self.executor is not None
            self.executor.settle()

    def _collect(self, group: int, numbers: list[int], leaves: list[Tensor]) -> None:
        self.sink(group, numbers, [leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None

    def _collect_outside(self, group: int, numbers: list[int], leaves: list[Tensor]) -> None:
        assert self.executor is not None
        if not self.executor.outside(group):
            raise Mispredicted(f"code outside of units depends on group {self.plan.groups[group].name}")
        self._collect(group, numbers, leaves)

    def _again(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Activation checkpointing around units calls them again inside of the backward.
        assert self.executor is not None
        if not self.executor.readable(list(self.reads[name].groups)):
            raise Mispredicted(f"the program calls unit {name} again inside of its backward")
        return function(*args, **kwargs)

    def _transformed(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A transform of torch.func differentiates the unit when it likes: it is code like any outside of units.
        assert self.executor is not None
        if self.graphs is not None:
            self.graphs.transformed(name)
        if not all([self.executor.outside(group) for group in self.reads[name].groups]):
            raise Mispredicted(f"unit {name} is called under a transform of torch.func")
        return function(*args, **kwargs)

    def _running(self, unit: Unit) -> Executor:
        if self.executor is None:
            raise UnitError(
                f"{unit!r} was called with parameters of a step that is over: use params only inside the loss "
                f"function, and state.params or fs.unshard(state.params, plan) outside"
            )
        return self.executor

    def _identify(self, unit: Unit, params: Any) -> Called:
        """The name of a unit's call, its parameters with slot leaves for handles, these leaves, and what to call."""
        # The tree that a split module hands to its unit is made once, so its identity tells everything.
        held = self.trees.get(unit)
        if held is not None and held[0] is params:
            return held[1]
        given = params
        leaves, spec = tree.flatten(params)
        function = unit.name or getattr(unit.fn, "__name__", "unit")
        key = (function, tuple([getattr(leaf, "_fshard_slot", unit) for leaf in leaves]))
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = self._register(unit, leaves)
        if any([type(leaf) is Handle for leaf in leaves]):
            leaves = [self.slots.by_path[path] for path in self.reads[name].paths]
            params = tree.unflatten(spec, leaves)
        function = unit.prepare(params) if unit.prepare else functools.partial(unit.fn, params)
        function = self.remat.around(name, function, self)
        called = (name, params, leaves, function)
        if unit.name:
            self.trees[unit] = (given, called)
        return called

    def _register(self, unit: Unit, leaves: list[Any]) -> str:
        slots = [slot_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        paths = tuple(slot.path for slot in slots if slot is not None and slot.engine is self)
        if len(paths) != len(leaves):
            raise UnitError(
                f"{unit!r} was called with {len(leaves)} parameter leaves, of which {len(leaves) - len(paths)} are not "
                f"leaves of this step's params: pass subtrees of params as they are, and everything else as arguments"
            )
        function = getattr(unit.fn, "__name__", "unit")
        name = unit.name or f"{function}({prefix(paths)})"
        if name in self.reads and self.reads[name].paths != paths:
            name = f"{function}({','.join(paths)})"
        self.reads.setdefault(name, Reads(paths, self.plan, self.slots))
        return name

    def _forbidden(
        self, unit: Unit, name: str, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> UnitError:
        # Autograd refused a write before it happened. A second run, on copies, tells what was to be written.
        copies = tree.map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (params, args, kwargs))
        watched = [x for x in tree.leaves(copies[1:]) if isinstance(x, Tensor)] + tree.leaves(copies[0])
        versions = [x._version for x in watched]
        with torch.no_grad():
            unit.fn(copies[0], *copies[1], **copies[2])
        return self.reads[name].written(name, watched, versions)


class Mark:
    """The hook on a unit's outputs: the first of their gradients to be complete begins the unit's backward."""

    __slots__ = ("engine", "index", "name", "passed")

    def __init__(self, engine: Engine, name: str, index: int) -> None:
        self.engine, self.name, self.index, self.passed = engine, name, index, False

    def __call__(self, grad: Tensor) -> None:
        """The gradient itself stays as it is."""
        if not self.passed:
            self.passed = self.engine.enter_backward(self.name, self.index)


def _tensors(values: Any) -> Sequence[Tensor]:
    """The tensors in any pytree. Flattening costs more than all else here, and is seldom needed."""
    if type(values) is Tensor:
        return (values,)
    if type(values) is tuple and all([type(value) is Tensor for value in values]):
        return values
    return [leaf for leaf in tree.leaves(values) if isinstance(leaf, Tensor)]
