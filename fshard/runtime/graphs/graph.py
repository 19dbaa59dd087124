"""A compiled graph: calls of equal units share one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.graphs.emit import GraphCode, PartedCode
from fshard.runtime.graphs.partition import Halves, cut
from fshard.runtime.graphs.trace_unit import (
    GraphResult,
    Joint,
    Left,
    Place,
    Source,
    Tangents,
    UntraceableUnit,
    trace,
)
from fshard.torch_internals import BelowAutograd, DisableAutocast, DisableTorchFunction, any_autocast, function_modes

Compiler = Callable[[Halves, Sequence[int], Sequence[str] | None], GraphCode]
"""Makes code of a graph: ``(graph, numbers of the leaves with gradients, names of what the forward saves)``."""


@contextmanager
def _below_all() -> Iterator[None]:
    with BelowAutograd(), DisableAutocast(), DisableTorchFunction():
        yield


def kernels_only() -> Any:
    """The context in which a graph's ops run: below autograd, autocast and function modes, whose work it holds."""
    return _below_all() if any_autocast() or function_modes() else BelowAutograd()


@dataclass(frozen=True, eq=False)
class Variant:
    """The backward for one pattern of gradients."""

    code: GraphCode
    edges: tuple[int, ...]  # for each edge of the autograd node the number of its part, or -1
    extra: tuple[tuple[int, int], ...]  # further parts, each with the edge that it is added to
    straight: bool  # whether the parts are the gradients of the edges, in their order
    left: Left  # what it leaves beside gradients, whose tensors come behind so many parts
    count: int

    def arrange(self, parts: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient of each edge."""
        if self.straight:
            return parts[: self.count]
        found = [parts[i] if i >= 0 else None for i in self.edges]
        for part, edge in self.extra:
            held = found[edge]
            found[edge] = parts[part] if held is None else held + parts[part]
        return found

    def beside(self, parts: Sequence[Tensor]) -> Any:
        """Return what it leaves beside gradients, a tree."""
        (spec, rest), tensors = self.left, iter(parts[self.count :])
        # Of the forward it may be the input itself, which holds the graph of what is before it.
        return tree.unflatten(spec, [next(tensors).detach() if x is Tensor else x for x in rest])


@dataclass(eq=False)
class Graph:
    """A compiled unit. ``code`` and ``saved``, names of tensors, are those of its first trace."""

    source: Source
    result: GraphResult
    compiler: Compiler
    number: int  # counts graphs in the order of compilation
    code: GraphCode
    edges: tuple[Place, ...]  # of its autograd node
    own: tuple[int, ...]  # the numbers of the leaves whose whole gradient it computes
    saved: tuple[str, ...]
    generators: tuple[torch.Generator, ...]  # that it names; torch's default ones are not among them
    variants: dict[Tangents, Variant | None]  # the backwards; None where that of the first trace serves
    waiting: list[Tangents]  # the patterns for which it has not been compared with the unit yet
    refused: str = ""  # why it is no longer used
    parted: dict[GraphCode, PartedCode] = field(default_factory=dict)  # backwards that have run in two parts

    def __post_init__(self) -> None:
        self.wanted = tuple(i for i, out in enumerate(self.result.outputs) if out.requires_grad)
        # Only calls of such graphs are nodes of autograd's graph.
        left = Tensor in self.proved.left[1]
        self.differentiable = bool(self.edges or self.own or left) and bool(self.wanted)

    @property
    def proved(self) -> Variant:
        """The backward of the first trace."""
        usual = self.variants[self.result.tangents]
        assert usual is not None
        return usual

    def variant(self, grads: Sequence[Tensor | None], pattern: Tangents) -> tuple[Variant, Sequence[Tensor | None]]:
        """The backward for gradients of this pattern, and the gradients in the form that it takes."""
        found = self.variants[pattern]
        if found is not None:
            return found, [grad for grad in grads if grad is not None]
        return self.proved, self.as_usual(grads)

    def learn(self, pattern: Tangents) -> Variant | None:
        """Trace a backward for gradients of these strides. A later call compares it with the unit's."""
        found = None
        try:
            halves = cut(trace(self.source, self.result, pattern), self.source.policy)
            if {node.name for node in halves.saved} <= set(self.saved) and halves.joint.left == self.proved.left:
                found = match(self.compiler(halves, self.own, self.saved), halves.joint, self.edges)
        except UntraceableUnit:
            pass
        self.variants[pattern] = found
        if found is not None and any(strides is not None for strides in pattern):
            self.waiting.append(pattern)
        return found

    def refuse(self, reason: str, pattern: Tangents | None = None) -> None:
        """Use the graph in no further call, nor this pattern in the backwards of earlier calls."""
        name = f"{self.code.backend} graph {self.number}"
        self.refused = f"{name} is not used, since it differs from the unit that it was traced from: {reason}"
        self.waiting.append(self.result.tangents)
        if pattern is not None:
            self.variants[pattern] = None

    def as_usual(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """These gradients with the strides that the first trace had; zeros for None."""
        made: list[Tensor | None] = []
        for grad, i in zip(grads, self.wanted, strict=True):
            out = self.result.outputs[i]
            usual = torch.empty_strided(out.shape, out.stride, dtype=out.dtype, device=out.device)
            made.append(usual.zero_() if grad is None else usual.copy_(grad))
        return made


def resolved(grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients without lazy conjugation and negation."""
    for grad in grads:
        if grad is not None and (grad.is_conj() or grad.is_neg()):
            return [None if x is None else x.resolve_conj().resolve_neg() for x in grads]
    return grads


def match(code: GraphCode, joint: Joint, edges: Sequence[Place]) -> Variant:
    """Assign the parts of gradients to the edges of an autograd node."""
    free = list(range(len(joint.places)))
    taken = []
    for edge in edges:
        part = next((i for i in free if joint.places[i] == edge), -1)
        taken.append(part)
        if part >= 0:
            free.remove(part)
    extra = [(i, max(n for n, edge in enumerate(edges) if edge == joint.places[i])) for i in free]
    straight = not extra and taken == list(range(len(joint.places)))
    return Variant(code, tuple(taken), tuple(extra), straight, joint.left, len(joint.places))


def compile_graph(source: Source, result: GraphResult, compiler: Compiler, number: int) -> Graph:
    """Trace and compile a unit, or raise ``UntraceableUnit``."""
    joint = trace(source, result, result.tangents)
    halves = cut(joint, source.policy)
    arguments = [x for node in joint.graph.nodes for x in (*node.args, *node.kwargs.values())]
    own = [i for i, leaf in enumerate(source.leaves) if i not in source.shared and leaf.requires_grad]
    code = compiler(halves, own, None)
    return Graph(
        source=source,
        result=result,
        compiler=compiler,
        number=number,
        code=code,
        edges=tuple(joint.places),
        own=tuple(own),
        saved=tuple(node.name for node in halves.saved),
        generators=tuple(dict.fromkeys(x for x in arguments if isinstance(x, torch.Generator))),
        variants={result.tangents: match(code, joint, joint.places)},
        waiting=[result.tangents],
    )
