"""Runs graphs: a unit's call becomes one node of autograd's graph."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import UnitError
from fshard.runtime.engine import Mispredicted, SavedView
from fshard.runtime.engine.engine import Engine
from fshard.runtime.graphs.emit import GraphCode, PartedCode
from fshard.runtime.graphs.graph import Graph, Variant, kernels_only, resolved
from fshard.runtime.graphs.graph_proof import proved_parts, strays
from fshard.runtime.memory.slots import storage_of

Claim = Callable[[Sequence[tuple[int, bool]]], bool]
"""``claim([(group, whole)])``: whether the caller may write these groups' flat gradients, instead of adding to them.
Ranges that it does not write are zeroed; ``whole`` says that it writes all leaves."""


class Bound:
    """A graph and the leaves of one unit: for each its group and its number in it, and by group their gradients."""

    def __init__(
        self, graph: Graph, leaves: list[Tensor], places: Sequence[tuple[int, int]], grads: dict[int, list[Tensor]]
    ) -> None:
        self.graph, self.leaves = graph, leaves
        self.epoch = -1
        self.views: Any = None
        self.own: dict[int, list[int]] = {}
        for number in graph.own:
            self.own.setdefault(places[number][0], []).append(number)
        self.places = places
        self.grads = [grads[places[n][0]][places[n][1]] for n in graph.own] if grads else []
        self.claims = [(group, len(numbers) == len(grads[group])) for group, numbers in self.own.items()]
        self.targets: dict[GraphCode | PartedCode, Any] = {}
        self.shared = any(kind == "leaf" for kind, _ in graph.edges)
        self.anchor = [leaves[graph.own[0]]] if graph.own else []
        self.single = graph.result.leaves == (("out", 0),) and tree.flatten(0)[1] == graph.result.spec

    def params(self, epoch: int) -> Any:
        """The leaves and the views of them that the graph reads."""
        if epoch != self.epoch:
            with torch.no_grad():
                self.views = self.graph.code.views(self.leaves)
            self.epoch = epoch
        return self.views

    def into(self, code: GraphCode | PartedCode) -> Any:
        """The views of the flat gradients that a backward writes."""
        found = self.targets.get(code)
        if found is None:
            found = self.targets[code] = code.targets(self.grads)
        return found

    def result(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The unit's result."""
        held = {"out": outputs, "in": inputs}
        leaves = [held[kind][what] if kind in held else what for kind, what in self.graph.result.leaves]
        return tree.unflatten(self.graph.result.spec, leaves)


class GraphCall:
    """One call of a unit, with what its backward needs."""

    __slots__ = ("bound", "claim", "host", "index", "name", "parts", "saved", "watched")

    def __init__(self, bound: Bound, host: Engine, claim: Claim, name: str, index: int) -> None:
        self.bound, self.host, self.claim, self.name, self.index = bound, host, claim, name, index
        self.saved: list[Any] | None = None
        self.parts: Sequence[Tensor | None] | None = None  # gradients of edges, from the first part of a backward
        self.watched: list[tuple[Tensor, int]] = []

    def run(self, inputs: Sequence[Tensor], anchored: bool) -> Any:
        """Run the forward."""
        bound = self.bound
        graph = bound.graph
        params = bound.params(self.host.epoch)
        with kernels_only():
            outputs, saved = graph.code.forward(params, *inputs)
        if graph.differentiable:
            outputs = self._attach(inputs, outputs, saved, anchored)
        return outputs[0] if bound.single else bound.result(outputs, inputs)

    def _attach(self, inputs: Any, outputs: Any, saved: list[Any], anchored: bool) -> Sequence[Tensor]:
        bound = self.bound
        graph = bound.graph
        watched_inputs, watched_outputs = graph.code.watched
        self.watched = [(inputs[i], inputs[i]._version) for i in watched_inputs]
        for i in watched_outputs:
            # An output itself would refer to its own node.
            alias = outputs[i].detach()
            for place, held in enumerate(saved):
                if held is outputs[i]:
                    saved[place] = alias
            self.watched.append((alias, alias._version))
        self._keep(saved)
        edges = [inputs[n] if kind == "in" else bound.leaves[n] for kind, n in graph.edges]
        if anchored or not edges:
            edges += bound.anchor
        wanted = graph.wanted
        attached = Node.apply(self, [outputs[i] for i in wanted], *edges)  # type: ignore[no-untyped-call]
        if len(wanted) == 1:
            attached = (attached,)
        if len(wanted) == len(outputs):
            return attached  # type: ignore[no-any-return]
        whole = dict(enumerate(outputs)) | dict(zip(wanted, attached, strict=True))
        return list(whole.values())

    def _keep(self, saved: list[Any]) -> None:
        """Keep what the forward has saved; what leaves for the host is watched where it is moved, and not held here."""
        self.saved = self.host.kept(self.name, self.index, saved)
        if self.saved is not saved:
            stays = {storage_of(x) for x in self.saved if isinstance(x, Tensor)}
            self.watched = [(x, version) for x, version in self.watched if storage_of(x) in stays]

    def backward(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the backward; return the gradients for the edges of the node."""
        if torch.is_grad_enabled() or not self.host.enter_backward(self.name, self.index):
            raise Mispredicted(f"the program differentiates unit {self.name} itself")
        if self.parts is not None:  # the second part asks for the gradients of leaves that several calls read
            return self.parts
        saved, self.saved = self.saved, None
        if saved is None:
            raise UnitError(
                f"unit {self.name} is differentiated twice, but its first backward freed what its forward saved"
            )
        self._check_unwritten()
        saved = [x.tensor() if isinstance(x, SavedView) else x for x in saved]
        graph = self.bound.graph
        grads = resolved(grads)
        pattern = tuple([None if grad is None else grad.stride() for grad in grads])
        if pattern not in graph.variants and (new := graph.learn(pattern)) is not None:
            if strays(graph, new, self.bound.params(self.host.epoch), saved, grads):
                graph.refuse("a backward for gradients of other strides gives other numbers", pattern)
        variant, tangents = graph.variant(grads, pattern)
        if (late := self.host.late) is not None:
            late[self.name, self.index] = functools.partial(self._run_second, variant)
            found = variant.arrange(self._run_first(variant, saved, tangents))
            self.parts = [x if kind == "leaf" else None for (kind, _), x in zip(graph.edges, found, strict=True)]
        else:
            found = variant.arrange(self._run(variant.code, saved, tangents))
        self.host.leave_backward(self.bound.shared)
        return found

    def _check_unwritten(self) -> None:
        """Refuse a backward of tensors that were written to."""
        for tensor, version in self.watched:
            if tensor._version != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"an argument or a result of unit {self.name}, of shape {list(tensor.shape)}, is at version "
                    f"{tensor._version}; expected version {version} instead"
                )
        self.watched.clear()

    def _run_first(self, variant: Variant, saved: list[Any], tangents: Sequence[Any]) -> Sequence[Tensor]:
        """Run the first part of a backward."""
        graph, params = self.bound.graph, self.bound.params(self.host.epoch)
        if variant.code not in graph.parted:
            graph.parted[variant.code] = proved_parts(graph, variant, params, saved, tangents)
        parts: Sequence[Tensor]
        with kernels_only():
            parts, self.saved = graph.parted[variant.code].first(params, saved, *tangents)
        return parts

    def _run_second(self, variant: Variant) -> None:
        """Run the second part of a backward, with what the first one left."""
        bound, code = self.bound, self.bound.graph.parted[variant.code]
        params = bound.params(self.host.epoch)
        if self.claim(bound.claims):
            with kernels_only():
                code.direct(params, self.saved, bound.into(code))
            return
        with kernels_only():
            grads = code.second(params, self.saved)
        self._deliver(grads)

    def _run(self, code: GraphCode, saved: list[Any], tangents: Sequence[Any]) -> Sequence[Tensor]:
        bound = self.bound
        params = bound.params(self.host.epoch)
        parts: Sequence[Tensor]
        if self.claim(bound.claims):
            with kernels_only():
                parts = code.direct(params, saved, bound.into(code), *tangents)
            return parts
        with kernels_only():
            parts, grads = code.backward(params, saved, *tangents)
        self._deliver(grads)
        return parts

    def _deliver(self, grads: Sequence[Tensor | None]) -> None:
        for group, numbers in self.bound.own.items():
            self.host.deliver(group, [self.bound.places[n][1] for n in numbers], [grads[n] for n in numbers])


class Node(torch.autograd.Function):
    """A unit's call in autograd's graph, made after its outputs were computed."""

    @staticmethod
    def forward(ctx: Any, call: GraphCall, outputs: Any, *edges: Tensor) -> Any:
        """Return the outputs. They come in a list: as arguments they would count as inputs that are returned."""
        ctx.call, ctx.edges = call, len(edges)
        if len(outputs) == 1:
            return outputs[0]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Run the unit's backward."""
        found = ctx.call.backward(grads)
        return None, None, *found, *([None] * (ctx.edges - len(found)))
