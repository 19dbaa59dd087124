"""Compares a graph with its unit: the first real call runs twice, as a graph and by the unit's own Python.

A trace can be wrong: an operator's rule for fake tensors may differ from its kernel, a rewrite may miss a case, a unit
may read a value that no key holds. So a graph is used only after it has computed what its unit computes: outputs,
writes to inputs, gradients of leaves and inputs, and the number of random draws. Both calls get copies of the inputs
and the same random numbers, and both backwards start from the same made-up gradients, so the comparison changes
nothing of the step. No graph holds collectives, so each rank compares alone.
"""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.graphs.graph import Graph, Variant, kernels_only
from fshard.runtime.graphs.trace import Result, Tangents

LOOSE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}
"""The tolerance for a compiled graph, relative to the largest number of a tensor; 0.05 for short dtypes."""

FLIPS = 0.01
"""The fraction of integers and flags that may differ in a compiled graph, because rounding decides them."""

Place = tuple[str, int]


@dataclass(frozen=True)
class Computed:
    """What a call computed.

    Attributes:
        tensors: by title, outputs, inputs after the call and gradients; None for a gradient of zero.
        draws: the states of the random generators after the call.
    """

    tensors: Mapping[str, Tensor | None]
    draws: Sequence[Any]


class Differs(Exception):  # noqa: N818 - not an error: the unit runs eagerly
    """A graph computes something else than its unit; the text says what."""


def difference(graph: Graph, pattern: Tangents, paths: Sequence[str], leaves: Sequence[Tensor], inputs: Any) -> str:
    """Compare a call of the graph with one of the unit's Python.

    Args:
        graph: the graph.
        pattern: the strides of the gradients to start from; the graph has a variant for them.
        paths: the paths of the leaves.
        leaves: the leaves of the unit.
        inputs: the tensors of the call.

    Returns:
        What differs, and by how much; empty if nothing does.
    """
    held = [leaf.detach() for leaf in leaves]
    try:
        with restored(graph, [*leaves, *inputs]) as states:
            want = _by_python(graph, pattern, paths, held, inputs, states)
        with restored(graph, [*leaves, *inputs]) as states:
            for direct in (False, True) if graph.differentiable else (False,):
                with restored(graph, [*leaves, *inputs]):
                    got = _by_graph(graph, pattern, paths, held, inputs, (states, direct))
                    _compare(want, got, graph.code.backend == "fx")
    except Differs as found:
        return str(found)
    except Exception as error:  # whatever an operator or the unit's Python raises
        return f"{type(error).__name__} while both ran: {str(error).strip().splitlines()[:1]}"
    return ""


def _by_python(graph: Graph, pattern: Tangents, paths: Any, held: Any, inputs: Any, states: Any) -> Computed:
    source = graph.source
    leaves = [x.detach().requires_grad_(meta.requires_grad) for x, meta in zip(held, source.leaves, strict=True)]
    given = [copied(x).requires_grad_(meta.requires_grad) for x, meta in zip(inputs, source.inputs, strict=True)]
    torch.clear_autocast_cache()
    try:
        with torch.set_grad_enabled(source.grad):
            flat, spec = tree.flatten(source.call(leaves, given))
    finally:
        torch.clear_autocast_cache()
    outputs = _checked_outputs(graph.result, flat, spec, given)
    found = _named("output", outputs) | _named("what is left in input", [x.detach() for x in given])
    draws = states()
    if graph.differentiable:
        pairs = [(outputs[i], tangent) for i, tangent in zip(graph.wanted, pattern, strict=True) if tangent is not None]
        found |= _python_gradients(pairs, leaves, given, paths)
    return Computed(found, draws)


def _checked_outputs(result: Result, flat: Sequence[Any], spec: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a call; all else that it returns must be what it returned in the trace."""
    if spec != result.spec or len(flat) != len(result.leaves):
        raise Differs("a result of another structure")
    for leaf, (kind, what) in zip(flat, result.leaves, strict=True):
        same = leaf is given[what] if kind == "in" else isinstance(leaf, Tensor) or kind == "value"
        if not same or (kind == "value" and (type(leaf) is not type(what) or leaf != what)):
            raise Differs(f"{leaf!r:.40} among the results, which was {what!r:.40} in the trace")
    outputs = [leaf for leaf, (kind, _) in zip(flat, result.leaves, strict=True) if kind == "out"]
    for number, (out, meta) in enumerate(zip(outputs, result.outputs, strict=True)):
        if out.requires_grad != meta.requires_grad:
            raise Differs(f"output {number} is differentiable in only one of them")
    return outputs


def _python_gradients(
    pairs: Sequence[tuple[Tensor, Sequence[int]]], leaves: Sequence[Tensor], given: Sequence[Tensor], paths: Any
) -> dict[str, Tensor | None]:
    """By title, the gradients of leaves and inputs from made-up gradients of outputs with these strides."""
    places = [("leaf", n, x) for n, x in enumerate(leaves)] + [("in", n, x) for n, x in enumerate(given)]
    wanted = [(_title((kind, n), paths), x) for kind, n, x in places if x.requires_grad]
    if not pairs or not wanted:
        return {}
    seeds = [seed(out, strides) for out, strides in pairs]
    with torch._C._DisableAutocast():
        grads = torch.autograd.grad([o for o, _ in pairs], [x for _, x in wanted], seeds, allow_unused=True)
    return {title: grad for (title, _), grad in zip(wanted, grads, strict=True)}


def _by_graph(graph: Graph, pattern: Tangents, paths: Any, held: Any, inputs: Any, how: tuple[Any, bool]) -> Computed:
    states, direct = how
    given = [copied(x) for x in inputs]
    with torch.no_grad():
        params = graph.code.views(held)
        with kernels_only():
            outputs, saved = graph.code.forward(params, *given)
        found = _named("output", outputs) | _named("what is left in input", given)
        draws = states()
        variant = graph.variants[pattern]
        if not graph.differentiable or variant is None or all(strides is None for strides in pattern):
            return Computed(found, draws)
        pairs = zip([outputs[i] for i in graph.wanted], pattern, strict=True)
        tangents = [seed(out, strides) for out, strides in pairs if strides is not None]
        return Computed(found | _gradients(graph, variant, paths, (params, saved, tangents), (held, direct)), draws)


def _gradients(graph: Graph, variant: Variant, paths: Any, what: Any, how: Any) -> dict[str, Tensor | None]:
    (params, saved, tangents), (held, direct) = what, how
    own: list[Tensor | None]
    with kernels_only():
        if direct:
            own = [torch.full_like(held[n], float("nan"), memory_format=torch.contiguous_format) for n in graph.own]
            parts = variant.code.direct(params, saved, variant.code.targets(own), *tangents)
        else:
            parts, grads = variant.code.backward(params, saved, *tangents)
            own = [grads[n] for n in graph.own]
        return {_title(place, paths): grad for place, grad in _totals(graph, variant, parts, own).items()}


def _totals(graph: Graph, variant: Variant, parts: Any, own: Sequence[Tensor | None]) -> dict[Place, Tensor | None]:
    """The gradient of each leaf and input: the sum of the parts that autograd would add."""
    found: dict[Place, Tensor | None] = {("leaf", n): grad for n, grad in zip(graph.own, own, strict=True)}
    for place, part in zip(graph.edges, variant.arrange(parts), strict=True):
        above = found.get(place)
        found[place] = above + part if above is not None and part is not None else part if above is None else above
    return found


def _named(what: str, tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"{what} {number}": x.detach() for number, x in enumerate(tensors)}


def _title(place: Place, paths: Sequence[str]) -> str:
    kind, number = place
    return f"the gradient of {paths[number]}" if kind == "leaf" else f"the gradient of input {number}"


def _compare(want: Computed, got: Computed, exact: bool) -> None:
    for name in {**want.tensors, **got.tensors}:
        found = apart(want.tensors.get(name), got.tensors.get(name), exact)
        if found:
            raise Differs(f"{name} {found}")
    if not all(map(_equal_states, want.draws, got.draws)):
        raise Differs("the graph draws another number of random numbers")


def _equal_states(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def apart(want: Tensor | None, got: Tensor | None, exact: bool) -> str:
    """How two tensors differ; empty if they do not, or within the tolerance. None stands for zeros.

    Args:
        want: the unit's.
        got: the graph's.
        exact: whether every bit must be equal.
    """
    if want is None or got is None:
        known = want if want is not None else got
        if known is None or not known.any():
            return ""
        return f"is zero in one of them, and up to {_largest(known):.3g} in the other"
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"is {_described(want)} by Python and {_described(got)} in the graph"
    a, b = _comparable(want), _comparable(got)
    if torch.equal(a, b):
        return ""
    if not (want.is_floating_point() or want.is_complex()):
        count = int((a != b).sum())
        return "" if not exact and count <= max(1, FLIPS * a.numel()) else f"differs in {count} of {a.numel()} elements"
    return _difference(a.to(torch.float64), b.to(torch.float64), 0.0 if exact else LOOSE.get(want.dtype, 0.05))


def _difference(a: Tensor, b: Tensor, tolerance: float) -> str:
    """How far two tensors of float64 are apart, if more than by this fraction of the largest number."""
    odd = ~(a.isfinite() & b.isfinite())
    if bool(((a != b) & ~(a.isnan() & b.isnan()) & odd).any()):
        return "is infinite or nan in one of them alone"
    off, most = float((a - b).masked_fill(odd, 0).abs().max()), _largest(a.masked_fill(odd, 0))
    return "" if off <= tolerance * most else f"differs by {off:.3g}, where its largest number is {most:.3g}"


def _comparable(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    if x.is_complex():
        return torch.view_as_real(x)
    return x.to(torch.float32) if x.is_floating_point() and x.itemsize == 1 else x


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def copied(x: Tensor) -> Tensor:
    """A copy with the same strides, overlapping ones too."""
    with torch.no_grad():
        flat = x.detach().as_strided((_extent(x.shape, x.stride()),), (1,)).clone()
        return flat.as_strided(x.shape, x.stride(), 0).detach()


def seed(out: Tensor, strides: Sequence[int]) -> Tensor:
    """A gradient to start from: numbers between -1/2 and 1/2, drawn from no generator."""
    with torch.no_grad():
        count = torch.arange(_extent(out.shape, strides), dtype=torch.int32, device=out.device)
        numbers = (count * 40503 + 12345).remainder(65521).to(torch.float32).div(65521).sub(0.5)
        flat = torch.complex(numbers, numbers.square()) if out.is_complex() else numbers
        return flat.to(out.dtype).as_strided(out.shape, tuple(strides))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if all(shape) else 0


@contextmanager
def restored(graph: Graph, tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Put all random generators back at the end; yields a function that returns their states."""
    devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
    modules = [(torch.get_device_module(device), device) for device in sorted(devices, key=str)]
    numpy = sys.modules.get("numpy")

    def states() -> list[Any]:
        return [
            torch.get_rng_state(),
            *[module.get_rng_state(device) for module, device in modules],
            *[generator.get_state() for generator in graph.generators],
        ]

    before, python = states(), random.getstate()
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield states
    finally:
        torch.set_rng_state(before[0])
        for (module, device), state in zip(modules, before[1:], strict=False):
            module.set_rng_state(state, device)
        for generator, state in zip(graph.generators, before[1 + len(modules) :], strict=True):
            generator.set_state(state)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


def strays(graph: Graph, variant: Variant, what: tuple[Any, list[Any], Sequence[Tensor | None]]) -> bool:
    """Whether a further backward computes something else than the backward that was compared with the unit.

    Args:
        graph: the graph.
        variant: the new backward.
        what: the views of the leaves, the tensors that the forward saved, and the incoming gradients.
    """
    params, saved, grads = what
    usual = graph.variants[graph.usual]
    assert usual is not None
    found = []
    with kernels_only():
        for one, tangents in ((usual, graph.as_usual(grads)), (variant, [g for g in grads if g is not None])):
            parts, own = one.code.backward(params, list(saved), *tangents)
            found.append(_totals(graph, one, parts, [own[n] for n in graph.own]))
    return any(_finite_parts_stray(usual, found[1][place]) for place, usual in found[0].items())


def _finite_parts_stray(usual: Tensor | None, got: Tensor | None) -> bool:
    if usual is None or got is None:
        known = usual if usual is not None else got
        return known is not None and bool((known.isfinite() & (known != 0)).any())
    odd = ~usual.isfinite()  # zero times infinity, where zeros stand for no gradient
    return bool(apart(usual.masked_fill(odd, 0), got.masked_fill(odd, 0), exact=False))
