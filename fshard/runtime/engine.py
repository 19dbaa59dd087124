"""The engine: what a unit's call does while a step runs.

Autograd is cut at each unit. The forward detaches the unit's inputs, runs it on the slot leaves and keeps the inner
graph; the backward differentiates that inner graph and puts the gradients of the leaves into their group's flat
gradient. In between the slots may hold other groups: the leaves keep their addresses, so once a group is gathered
again the inner graph is valid again. The outer graph, of cuts and of the code between units, is autograd's own.

The engine knows neither schedule nor communication. It tells an *executor* which compute op it has come to
(``reach``), and the executor sees to it that everything that stands before that op has been done. Three executors
exist: one runs a schedule, one gathers on demand, and one, on fake tensors, only writes down what it sees.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import UnitError
from fshard.model.unit import Unit, slot_of
from fshard.runtime.slots import Slots
from fshard.sharding.plan import Plan


class Executor(Protocol):
    """What the engine tells where the program is."""

    def reach(self, kind: str, unit: str, index: int) -> None:
        """The program is at this compute op: whatever must precede it is done on return."""

    def settle(self) -> None:
        """The compute op is over: start what can run beside the code that follows."""


class Reads:
    """Which leaves a unit reads, by group: positions in the unit's flat leaves, and leaf numbers in the group."""

    def __init__(self, paths: Sequence[str], plan: Plan) -> None:
        places = plan.places()
        self.paths = tuple(paths)
        self.groups: dict[int, tuple[list[int], list[int]]] = {}
        self.trainable: list[int] = []
        for position, path in enumerate(paths):
            group, number = places[path]
            positions, numbers = self.groups.setdefault(group.id, ([], []))
            positions.append(len(self.trainable))
            numbers.append(number)
            if group.trainable:
                self.trainable.append(position)
        self.sinks = [(g, at, numbers) for g, (at, numbers) in self.groups.items() if plan.groups[g].trainable]


class Engine:
    """Runs a program's units on slots. One is made for each distinct program of a step.

    Args:
        plan: the plan.
        slots: makes the slots, given this engine: leaves must know whom a unit's call goes to.
        sink: receives ``(group id, leaf numbers, gradients)``; a None gradient is zero.
    """

    def __init__(self, plan: Plan, sink: Callable[[int, list[int], list[Tensor | None]], None]) -> None:
        self.plan = plan
        self.slots = Slots(plan.groups, plan.mesh, self)
        self.sink = sink
        self.executor: Executor | None = None
        self.anchor = torch.zeros((), device=plan.mesh.device, requires_grad=True)
        self.inside = False
        self.counts: dict[str, int] = {}
        self.reads: dict[str, Reads] = {}
        self.names: dict[tuple[Unit, tuple[object, ...]], str] = {}
        self.storages: set[int] = set()

    def start(self, executor: Executor) -> None:
        """Begin a pass of the program: the next calls of units are the first of their name."""
        self.executor, self.inside = executor, False
        self.counts.clear()
        self.storages = self.slots.storages()

    def call(self, unit: Unit, params: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit is called with slot leaves for parameters. A unit inside a unit is part of the outer one."""
        if self.inside:
            return unit.fn(params, *args, **kwargs)
        executor = self._running(unit)
        leaves = tree.leaves(params)
        name = self._name(unit, leaves)
        index = self.counts.get(name, 0)
        self.counts[name] = index + 1
        executor.reach("forward", name, index)
        call = UnitCall(self, unit, name, index, params, leaves)
        out = call.cut(args, kwargs) if torch.is_grad_enabled() else call.plain(args, kwargs)
        executor.settle()
        return out

    def params(self) -> dict[str, Any]:
        """The parameter tree that the loss function gets: nested dicts of slot leaves."""
        return tree.nest({path: self.slots.by_path[path] for path in self.plan.leaves})

    def outer_gradients(self, total: Tensor, seed: Tensor) -> dict[int, list[Tensor | None]]:
        """Run the outer backward from a loss.

        Returns:
            The gradients that code outside of units has for leaves, of each group that has any, by group id.
        """
        trainable = [slots for slots in self.slots.groups if slots.group.trainable]
        leaves = [leaf for slots in trainable for leaf in slots.leaves]
        _, *grads = torch.autograd.grad(total, [self.anchor, *leaves], seed, allow_unused=True)
        found: dict[int, list[Tensor | None]] = {}
        start = 0
        for slots in trainable:
            mine = grads[start : start + len(slots.leaves)]
            start += len(mine)
            if any(grad is not None for grad in mine):
                found[slots.group.id] = list(mine)
        return found

    def sink_outer(self, found: dict[int, list[Tensor | None]]) -> None:
        """Put what ``outer_gradients`` returned into the flat gradients."""
        for group, grads in found.items():
            self.sink(group, list(range(len(grads))), grads)

    def _running(self, unit: Unit) -> Executor:
        if self.executor is None:
            raise UnitError(
                f"{unit!r} was called with parameters of a step that is over: use params only inside the loss "
                f"function, and state.params or fs.unshard(state.params, plan) outside"
            )
        return self.executor

    def _name(self, unit: Unit, leaves: list[Any]) -> str:
        key = (unit, tuple([getattr(leaf, "_fshard_slot", unit) for leaf in leaves]))
        name = self.names.get(key)
        if name is None:
            name = self.names[key] = self._register(unit, leaves)
        return name

    def _register(self, unit: Unit, leaves: list[Any]) -> str:
        slots = [slot_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        paths = tuple(slot.path for slot in slots if slot is not None and slot.engine is self)
        if len(paths) != len(leaves):
            raise UnitError(
                f"{unit!r} was called with {len(leaves)} parameter leaves, of which {len(leaves) - len(paths)} are not "
                f"leaves of this step's params: pass subtrees of params as they are, and everything else as arguments"
            )
        function = getattr(unit.fn, "__name__", "unit")
        name = unit.name or f"{function}({_prefix(paths)})"
        if name in self.reads and self.reads[name].paths != paths:
            name = f"{function}({','.join(paths)})"
        self.reads.setdefault(name, Reads(paths, self.plan))
        return name


class UnitCall:
    """One call of a unit, from its forward to its backward."""

    def __init__(self, engine: Engine, unit: Unit, name: str, index: int, params: Any, leaves: list[Tensor]) -> None:
        self.engine, self.unit, self.name, self.index = engine, unit, name, index
        self.params, self.leaves = params, leaves

    def plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call without a graph, under ``torch.no_grad()``."""
        before = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = self._run(before, lambda: self.unit.fn(self.params, *args, **kwargs))
        self._check_alias([x for x in tree.leaves(out) if isinstance(x, Tensor)])
        return out

    def cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as one node of the outer graph."""
        self.flat, self.spec = tree.flatten((args, kwargs))
        self.at = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor)]
        tensors = [self.flat[i] for i in self.at]
        outs = _Cut.apply(self, self.engine.anchor, *tensors)  # type: ignore[no-untyped-call]
        flat, spec, at = self.result
        for i, out in zip(at, outs, strict=True):
            flat[i] = out
        del self.flat, self.result
        return tree.unflatten(spec, flat)

    def forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the unit on detached inputs and keep the inner graph."""
        self.inputs = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        for i, x in zip(self.at, self.inputs, strict=True):
            self.flat[i] = x
        args, kwargs = tree.unflatten(self.spec, self.flat)
        with torch.enable_grad():
            result = self._run(self.inputs, lambda: self.unit.fn(self.params, *args, **kwargs))
        flat, spec = tree.flatten(result)
        at = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        self.outs = [flat[i] for i in at]
        self._check_alias(self.outs)
        self.result = (flat, spec, at)
        return tuple(x.detach() for x in self.outs)

    def backward(self, grads: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        """Differentiate the inner graph: gradients of leaves go to the sink, those of the inputs back."""
        engine = self.engine
        executor = engine._running(self.unit)
        executor.reach("backward", self.name, self.index)
        reads = engine.reads[self.name]
        wanted = [self.leaves[i] for i in reads.trainable]
        split = len(wanted)
        inputs = [i for i, x in enumerate(self.inputs) if x.requires_grad]
        wanted += [self.inputs[i] for i in inputs]
        pairs = [(o, g) for o, g in zip(self.outs, grads, strict=True) if g is not None and o.requires_grad]
        got: Sequence[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            outs, seeds = zip(*pairs, strict=True)
            engine.inside = True
            try:
                got = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
            finally:
                engine.inside = False
        for group, positions, numbers in reads.sinks:
            engine.sink(group, numbers, [got[i] for i in positions])
        back: list[Tensor | None] = [None] * len(self.inputs)
        for i, grad in zip(inputs, got[split:], strict=True):
            back[i] = grad
        self.outs, self.inputs = [], []
        executor.settle()
        return back

    def _run(self, inputs: list[Tensor], body: Callable[[], Any]) -> Any:
        """Run the unit's function, and check that it wrote to none of what it was given."""
        watched = [*inputs, *self.leaves]
        versions = [x._version for x in watched]
        self.engine.inside = True
        try:
            result = body()
        finally:
            self.engine.inside = False
        if versions != [x._version for x in watched]:
            self._raise_written(watched, versions)
        return result

    def _raise_written(self, watched: list[Tensor], versions: list[int]) -> None:
        changed = [i for i, x in enumerate(watched) if x._version != versions[i]]
        paths = self.engine.reads[self.name].paths
        count = len(watched) - len(paths)
        what = [f"parameter {paths[i - count]}" if i >= count else f"input {i}" for i in changed]
        raise UnitError(
            f"unit {self.name} wrote in place to {', '.join(what)}: units are pure functions, so return new values "
            f"(x = x + y, not x += y), or clone what is to be changed"
        )

    def _check_alias(self, outs: list[Tensor]) -> None:
        for number, out in enumerate(outs):
            if out.untyped_storage()._cdata in self.engine.storages:
                raise UnitError(
                    f"output {number} of unit {self.name} is a view of one of its parameters ({_names(self)}), whose "
                    f"memory will hold another unit's weights: return a copy (.clone()), or read the parameter where "
                    f"it is used"
                )


class _Cut(torch.autograd.Function):
    """The node of the outer graph that stands for one call of a unit.

    The anchor is a scalar that requires grad, so that the node exists even if no input of the unit does.
    """

    @staticmethod
    def forward(ctx: Any, call: UnitCall, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outs = call.forward(tensors)
        ctx.mark_non_differentiable(*[x for x in outs if not x.dtype.is_floating_point])
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, ctx.call = ctx.call, None
        return None, None, *call.backward(grads)


def _prefix(paths: Sequence[str]) -> str:
    """The longest path that all of these start with; all of them, if there is none."""
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) or ",".join(paths)


def _names(call: UnitCall) -> str:
    paths = call.engine.reads[call.name].paths
    return ", ".join(paths[:4]) + (", ..." if len(paths) > 4 else "")
