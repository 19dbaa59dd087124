"""A graph's backward in two parts computes what the whole one does, and in the first part no more than inputs need."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fshard import errors, tree
from fshard.runtime.graphs.emit import GraphCode, emit
from fshard.runtime.graphs.graph import Graph, Variant, compile_graph
from fshard.runtime.graphs.graph_proof import proved_parts
from fshard.runtime.graphs.inductor import compile_halves
from fshard.runtime.graphs.trace_unit import Source, inspect, meta_of
from fshard.torch_internals import TorchDispatchMode


def feed(p: Any, x: Tensor) -> Tensor:
    """Layers whose gradients of weights and of inputs are ops of their own."""
    return F.linear(torch.tanh(F.linear(x, p["a"], p["b"])), p["c"])


def normed(p: Any, x: Tensor) -> Tensor:
    """An op that gives gradients of inputs and of leaves at once."""
    return F.linear(F.layer_norm(x, (6,), p["b"], p["d"]), p["a"])


def shifted(p: Any, x: Tensor) -> Tensor:
    """A gradient that is the one that arrives."""
    return x + p["b"]


def unread(p: Any, x: Tensor) -> Tensor:
    """A leaf that has no gradient."""
    return x * p["b"] + p["a"].detach().sum()


def written(p: Any, x: Tensor) -> Tensor:
    """A backward that writes in place: into zeros of its own."""
    return (x @ p["a"])[torch.tensor([0, 2, 0])]


def looked_up(p: Any, x: Tensor) -> Tensor:
    """No gradient of an input."""
    return F.embedding(x.detach().abs().long() % 6, p["a"]) * p["b"]


def leaves() -> dict[str, Tensor]:
    """Leaves of all functions."""
    torch.manual_seed(1)
    sizes = {"a": (6, 6), "b": (6,), "c": (6, 6), "d": (6,)}
    return {name: torch.randn(size).requires_grad_() for name, size in sizes.items()}


def compiled(fn: Callable[..., Any], compiler: Any) -> tuple[Graph, list[Tensor], Tensor]:
    """The graph of a function, its leaves and its input."""
    flat, spec = tree.flatten(leaves())
    x = torch.randn(4, 6).requires_grad_()
    values, args = tree.flatten(((x,), {}))
    source = Source(fn, spec, args, tuple(map(meta_of, flat)), frozenset(), tuple(map(meta_of, values)), grad=True)
    return compile_graph(source, inspect(source), compiler, 0), [leaf.detach() for leaf in flat], x.detach()


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiler", [emit, compile_halves])
@pytest.mark.parametrize("fn", [feed, normed, shifted, unread, written, looked_up])
def test_both_parts_compute_what_the_whole_backward_does(fn: Any, compiler: Any) -> None:
    graph, params, x = compiled(fn, compiler)
    code, views = graph.code, graph.code.views(params)
    outputs, saved = code.forward(views, x)
    grads = [torch.randn_like(out) for out in outputs]
    parts, own = code.backward(views, [*saved], *grads)
    parted = proved_parts(graph, graph.proved, views, saved, grads)
    first, left = parted.first(views, [*saved], *grads)
    kept = [*left]
    assert all(map(torch.equal, parts, first)) and len(parts) == len(first)
    second = parted.second(views, left)
    assert not left
    into = [torch.full_like(params[n], torch.nan) for n in graph.own]
    parted.direct(views, kept, parted.targets(into))
    assert not kept
    for number, flat in zip(graph.own, into, strict=True):
        want = own[number] if own[number] is not None else torch.zeros_like(flat)
        assert torch.equal(want, flat) and (second[number] is None or torch.equal(want, second[number]))


def test_the_first_part_has_no_product_for_weights() -> None:
    """Of four products two are of inputs, which other stages wait for."""
    graph, params, x = compiled(feed, emit)
    views = graph.code.views(params)
    outputs, saved = graph.code.forward(views, x)
    parted, grads = graph.code.part(), [torch.ones_like(out) for out in outputs]
    with Products() as early:
        _, left = parted.first(views, saved, *grads)
    with Products() as late:
        parted.second(views, left)
    assert (early.count, late.count) == (2, 2) and not saved


def test_parts_that_compute_something_else_are_an_error() -> None:
    graph, params, x = compiled(feed, emit)
    views = graph.code.views(params)
    outputs, saved = graph.code.forward(views, x)
    wrong: GraphCode = copy.copy(graph.code)
    parted = graph.code.part()
    off = replace(parted, second=lambda p, left: [g + 1 if g is not None else g for g in parted.second(p, left)])
    object.__setattr__(wrong, "part", lambda: off)
    variant: Variant = replace(graph.proved, code=wrong)
    with pytest.raises(errors.UnitError, match="two parts"):
        proved_parts(graph, variant, views, saved, [torch.ones_like(out) for out in outputs])
