"""Traces a unit: its forward and its backward become one graph of ATen ops, on fake tensors alone.

The unit's function runs under ``make_fx``, and autograd differentiates it there and then, so the graph holds exactly
the ops that the engine would run eagerly, in autograd's own order. No op is decomposed or reordered,
because a unit's graph must give the same bits as the unit.

A tensor that is used several times gets its gradient in several parts, which autograd adds in the order in which they
arrive, across units. A sum made inside of a unit would be another order, so the graph returns the parts.
"""

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from fshard import tree
from fshard.model import draws
from fshard.model.checkpoint_policies import SavePolicy
from fshard.model.float8 import attach_rows
from fshard.runtime.engine.fake_fallback import KernelFakeMode, quiet
from fshard.runtime.memory.slots import storage_of
from fshard.torch_internals import DisableAutocast, FakeTensor, TorchDispatchMode

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, enum.Enum)
"""Python values that a graph may depend on, and that a unit may return."""

MAKERS = frozenset((torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default))
"""Operators that make a tensor of Python numbers."""


class UntraceableUnit(Exception):  # noqa: N818 - not an error: the unit runs eagerly
    """A unit cannot be run as a graph; the text says why."""


@dataclass(frozen=True)
class Meta:
    """The properties of a tensor that a graph depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def fake(self) -> Tensor:
        """A tensor with these properties; call this inside of a fake mode."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


def meta_of(x: Tensor, grad: bool = True) -> Meta:
    """The meta of a tensor, which requires grad only if gradients are enabled."""
    return Meta(tuple(x.shape), x.stride(), x.dtype, x.device, grad and x.requires_grad)


class Same(NamedTuple):
    """Stands for an input that is the same tensor as an earlier one: a unit may ask whether they are."""

    number: int


Place = tuple[str, int]
"""``("leaf" or "in", number)``: a leaf or an input that has a gradient."""


class Tape(Protocol):
    """Takes what the backward of a unit leaves beside gradients: the attribute ``tape`` of the unit's function."""

    def tried(self) -> Any:
        """Return what the latest call without an engine has left, a tree; leaves of the params go by their numbers."""

    def keep(self, call: tuple[str, int], paths: Sequence[str], left: Any) -> None:
        """Take such a tree of the graph of a call, given the paths of its leaves."""


Left = tuple[Any, list[Any]]
"""The structure of what a backward leaves, and its leaves, with ``Tensor`` for each tensor."""


def exact(value: Any) -> tuple[Any, ...]:
    """A key that is equal for values that a program cannot tell apart; the type of a value that no graph takes."""
    if isinstance(value, Same):
        return (Same, value.number)
    if isinstance(value, float):
        return (float, value, math.copysign(1.0, value))
    return (type(value), value) if isinstance(value, PLAIN) else (type(value),)


@dataclass(frozen=True, eq=False)
class Source:
    """A call ``fn(params, *args, **kwargs)`` to trace: structures of trees, and their leaves.

    Of the arguments, ``values`` holds a ``Meta`` for each tensor and ``Same`` for a repeated one.
    """

    fn: Callable[..., Any]
    params: Any
    args: Any
    leaves: tuple[Meta, ...]
    shared: frozenset[int]  # the leaves whose gradient autograd sums, because other calls read them too
    values: tuple[Any, ...]
    grad: bool  # whether gradients are enabled
    policy: SavePolicy | None = None  # which results are kept for the backward; None keeps what autograd keeps
    rows: tuple[int, ...] = ()  # the leaves without values, whose payloads and scales follow all leaves of the params

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that compute the same, as far as the call itself shows."""
        kind = getattr(self.fn, "kind", None)
        values = tuple(x if isinstance(x, (Meta, Same)) else exact(x) for x in self.values)
        code = self.fn if kind is None else kind()
        return code, self.params, self.args, self.leaves, self.shared, values, self.policy, self.rows

    @property
    def tape(self) -> Tape | None:
        """Takes what its backward leaves beside gradients; None if that is nothing."""
        found: Tape | None = getattr(self.fn, "tape", None)
        return found

    def left(self) -> tuple[Left, list[Tensor]]:
        """Return what the backward of the latest call has left beside gradients: its structure, and its tensors."""
        leaves, spec = tree.flatten(None if self.tape is None else self.tape.tried())
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        return (spec, [Tensor if isinstance(x, Tensor) else x for x in leaves]), tensors

    @property
    def inputs(self) -> list[Meta]:
        """The tensors among the values."""
        return [value for value in self.values if isinstance(value, Meta)]

    def fakes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Leaves and inputs; call this inside of a fake mode."""
        return [leaf.fake() for leaf in self.leaves], [value.fake() for value in self.inputs]

    def call(self, leaves: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Call the function with these tensors."""
        rest = iter(inputs)
        values = [next(rest) if isinstance(value, Meta) else value for value in self.values]
        values = [inputs[value.number] if isinstance(value, Same) else value for value in values]
        args, kwargs = tree.unflatten(self.args, values)
        own, more = leaves[: len(leaves) - 2 * len(self.rows)], iter(leaves[len(leaves) - 2 * len(self.rows) :])
        for number in self.rows:
            attach_rows(own[number], (next(more), next(more)))
        return self.fn(tree.unflatten(self.params, own), *args, **kwargs)


Tangents = tuple[tuple[int, ...] | None, ...]
"""For each differentiable output the strides of its gradient; None if it has no gradient."""


@dataclass(frozen=True)
class GraphResult:
    """The making of a unit's result of its graph's outputs, which are differentiable if they require grad."""

    spec: Any
    leaves: tuple[tuple[str, Any], ...]  # each ``("out", number)``, ``("in", number of an input)`` or ``("value", it)``
    outputs: tuple[Meta, ...]

    @property
    def tangents(self) -> Tangents:
        """The gradients to expect: one for each differentiable output, with its strides."""
        return tuple(out.stride for out in self.outputs if out.requires_grad)


@dataclass(frozen=True, eq=False)
class Joint:
    """A traced call: placeholders for leaves, inputs and tangents, then the ops; those of the forward first."""

    module: fx.GraphModule
    leaves: list[fx.Node]
    inputs: list[fx.Node]
    tangents: list[fx.Node | None]  # one for each differentiable output; None where it has no gradient
    forward: set[fx.Node]  # without the placeholders of tangents
    count: int  # of outputs
    places: list[Place]  # the leaf or input of each part of a gradient, as parts arrive
    present: list[bool]  # for each leaf whether it has a gradient here; a shared one has parts instead
    left: Left  # what the backward leaves beside gradients

    @property
    def graph(self) -> fx.Graph:
        """The graph of the module."""
        return self.module.graph

    @property
    def flat(self) -> list[fx.Node]:
        """The results: outputs, parts, what is left, gradients. Read anew each time, because nodes may be replaced."""
        return list(self.graph.output_node().args[0])  # type: ignore[arg-type]

    @property
    def outputs(self) -> list[fx.Node]:
        """The outputs of the unit."""
        return self.flat[: self.count]

    @property
    def parts(self) -> list[fx.Node]:
        """The parts of gradients that autograd sums, then what the backward leaves beside gradients."""
        return self.flat[self.count : self._end]

    @property
    def grads(self) -> list[fx.Node | None]:
        """The gradient of each leaf; None where there is none."""
        rest = iter(self.flat[self._end :])
        return [next(rest) if present else None for present in self.present]

    @property
    def _end(self) -> int:
        return self.count + len(self.places) + self.left[1].count(Tensor)


def inspect(source: Source) -> GraphResult:
    """Run the unit on fake tensors and describe its result, or raise ``UntraceableUnit``."""
    before = draws.states()
    with quiet(), KernelFakeMode() as mode, NoRealTensors():  # type: ignore[no-untyped-call]
        leaves, inputs = source.fakes()
        watched = [*leaves, *inputs]
        versions = [x._version for x in watched]
        flat, spec = tree.flatten(source.call(leaves, inputs))
    if versions != [x._version for x in watched]:
        raise UntraceableUnit("it writes in place to what it was given")
    if draws.drawn(before, draws.states()):
        draws.restore(before)
        raise UntraceableUnit("it draws from Python's random or numpy's, whose numbers would be the same in every step")
    found: list[tuple[str, Any]] = []
    outputs: list[Tensor] = []
    storages = {key for x in watched if (key := storage_of(x)) is not None}
    for leaf in flat:
        same = [i for i, x in enumerate(inputs) if leaf is x]
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise UntraceableUnit(f"it returns a {type(leaf).__name__}, neither a tensor nor a plain Python value")
        if not isinstance(leaf, Tensor):
            found.append(("value", leaf))
        elif same:
            found.append(("in", same[0]))
        else:
            _check_output(leaf, mode, storages)
            found.append(("out", len(outputs)))
            outputs.append(leaf)
    return GraphResult(spec, tuple(found), tuple(meta_of(out) for out in outputs))


class NoRealTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors with data. The fake mode would print them in its error, which fails under jvp."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree.leaves((args, kwargs or {})):
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and func not in MAKERS:
                raise UntraceableUnit(
                    f"it cannot be a graph: it reads a tensor of shape {list(x.shape)} that is not an argument of it"
                )
        return func(*args, **(kwargs or {}))


def _check_output(out: Tensor, mode: KernelFakeMode, storages: set[int]) -> None:
    if getattr(out, "fake_mode", None) is not mode:
        raise UntraceableUnit("it returns a tensor that it did not compute from its arguments")
    if out.layout is not torch.strided or out.is_nested:
        raise UntraceableUnit("it returns a tensor that is not strided")
    storage = out.untyped_storage()._cdata
    if storage in storages:
        raise UntraceableUnit(
            "it returns a view of an argument, a parameter or another result, not a tensor of its own"
        )
    storages.add(storage)


def trace(source: Source, result: GraphResult, tangents: Tangents) -> Joint:
    """Trace a unit, with its backward from gradients with these strides, or raise ``UntraceableUnit``."""
    with KernelFakeMode():
        leaves, inputs = source.fakes()
        pairs = zip((out for out in result.outputs if out.requires_grad), tangents, strict=True)
        seeds = [replace(out, stride=stride, requires_grad=False).fake() for out, stride in pairs if stride is not None]
    tracer = _Tracer(source, [strides is not None for strides in tangents])
    torch.clear_autocast_cache()
    with quiet(), torch.set_grad_enabled(source.grad):
        module = make_fx(tracer, tracing_mode="fake")(leaves, inputs, seeds)
    torch.clear_autocast_cache()
    return tracer.joint(module)


class _Tracer:
    """The function that ``make_fx`` traces. It records the meaning of each of the graph's results."""

    def __init__(self, source: Source, seeded: list[bool]) -> None:
        self.source, self.seeded = source, seeded
        self.split = self.count = 0
        self.places: list[Place] = []
        self.present: list[bool] = []
        self.left: Left = None, []

    def __call__(self, leaves: list[Tensor], inputs: list[Tensor], seeds: list[Tensor]) -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        flat = tree.leaves(self.source.call(leaves, inputs))
        outputs = [x for x in flat if isinstance(x, Tensor) and not any(x is y for y in inputs)]
        self.split, self.count = len(mode.tracer.graph.nodes), len(outputs)
        wanted = [out for out in outputs if out.requires_grad]
        parts, grads = self._backward(leaves, inputs, list(itertools.compress(wanted, self.seeded)), seeds)
        self.left, beside = self.source.left()
        self.places = [place for place, _ in parts]
        self.present = [grad is not None for grad in grads]
        return [*outputs, *(part for _, part in parts), *beside, *(grad for grad in grads if grad is not None)]

    def _backward(
        self, leaves: list[Tensor], inputs: list[Tensor], outputs: list[Tensor], seeds: list[Tensor]
    ) -> tuple[list[tuple[Place, Tensor]], list[Tensor | None]]:
        """The parts of gradients that autograd sums, and the gradient of each leaf that it computes whole."""
        shared = self.source.shared
        own = {i: x for i, x in enumerate(leaves) if x.requires_grad and i not in shared}
        summed: dict[Place, Tensor] = {("leaf", i): leaves[i] for i in sorted(shared)}
        summed |= {("in", i): x for i, x in enumerate(inputs)}
        targets = {place: x for place, x in summed.items() if x.requires_grad}
        parts: list[tuple[Place, Tensor]] = []
        if not outputs or not (targets or own):
            return parts, [None] * len(leaves)
        _watch(outputs, targets, parts)
        with DisableAutocast():  # a backward runs when the context of its forward is over
            found = torch.autograd.grad(outputs, [*own.values(), *targets.values()], seeds, allow_unused=True)
        grads = dict(zip(own, found, strict=False))
        return parts, [grads.get(i) for i in range(len(leaves))]

    def joint(self, module: fx.GraphModule) -> Joint:
        module.graph.set_codegen(fx.graph.CodeGen())  # flat arguments and results
        nodes = list(module.graph.nodes)
        holders = [node for node in nodes if node.op == "placeholder"]
        n, m = len(self.source.leaves), len(self.source.inputs)
        rest = iter(holders[n + m :])
        return Joint(
            module=module,
            leaves=holders[:n],
            inputs=holders[n : n + m],
            tangents=[next(rest) if seeded else None for seeded in self.seeded],
            forward=set(nodes[: self.split]) - set(holders[n + m :]),
            count=self.count,
            places=self.places,
            present=self.present,
            left=self.left,
        )


def _watch(outputs: list[Tensor], targets: Mapping[Place, Tensor], parts: list[tuple[Place, Tensor]]) -> None:
    """Record each part of a target's gradient when autograd computes it."""
    ends = {torch.autograd.graph.get_gradient_edge(x).node: place for place, x in targets.items()}

    def recorder(hits: list[tuple[int, Place]]) -> Callable[..., None]:
        def record(grads: tuple[Tensor | None, ...], above: Any) -> None:
            parts.extend((place, grad) for i, place in hits if (grad := grads[i]) is not None)

        return record

    seen: set[Any] = {None}
    stack: list[Any] = [out.grad_fn for out in outputs]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        below = [other for other, _ in node.next_functions]
        if hits := [(i, ends[other]) for i, other in enumerate(below) if other in ends]:
            node.register_hook(recorder(hits))
        stack.extend(below)
