"""Compares a graph with its unit: the first real call runs twice, as a graph and by the unit's own Python.

A trace can be wrong: an operator's rule for fake tensors may differ from its kernel, a rewrite may miss a case, a unit
may read a value that no key holds. So a graph is used only after it has computed what its unit computes: outputs,
writes to inputs, gradients of leaves and inputs, and the number of random draws. Both calls get copies of the inputs
and the same random numbers, and both backwards start from the same made-up gradients, so the comparison changes
nothing of the step. No graph holds collectives, so each rank compares alone.
"""

import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import UnitError
from fshard.runtime.graphs.emit import PartedCode
from fshard.runtime.graphs.graph import Graph, Variant, kernels_only
from fshard.runtime.graphs.trace_unit import GraphResult, Place, Tangents
from fshard.torch_internals import DisableAutocast

LOOSE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3, torch.complex64: 1e-3}
"""The tolerance for a compiled graph, relative to the largest number of a tensor; 0.05 for short dtypes."""

FLIPS = 0.01
"""The fraction of integers and flags that may differ in a compiled graph, because rounding decides them."""

LEFT = "what the backward leaves beside gradients,"

Computed = dict[str, Tensor | None]
"""By title, outputs, inputs after the call and gradients; None for a gradient of zero."""


class Differs(Exception):  # noqa: N818 - not an error: the unit runs eagerly
    """A graph computes something else than its unit; the text says what."""


def difference(
    graph: Graph, pattern: Tangents, paths: Sequence[str], leaves: Sequence[Tensor], inputs: Sequence[Tensor]
) -> str:
    """Return what a call of the graph computes differently from the unit's Python, and by how much; empty if nothing.

    Gradients start with strides of ``pattern``, for which the graph has a variant.
    """
    trial = _Trial(graph, pattern, paths, [leaf.detach() for leaf in leaves], inputs)
    try:
        want, draws = trial.run(trial.by_python)
        for direct in (False, True) if graph.differentiable else (False,):
            got, drawn = trial.run(functools.partial(trial.by_graph, direct))
            for title in {**want, **got}:
                if found := apart(want.get(title), got.get(title), graph.code.backend == "fx"):
                    raise Differs(f"{title} {found}")
            if not all(map(torch.equal, draws, drawn)):
                raise Differs("the graph draws another number of random numbers")
    except Differs as found:
        return str(found)
    except Exception as error:  # whatever an operator or the unit's Python raises
        return f"{type(error).__name__} while both ran: {str(error).strip().splitlines()[:1]}"
    return ""


@dataclass(frozen=True)
class _Trial:
    """A call that runs several times, on copies of its inputs and from made-up gradients with the pattern's strides."""

    graph: Graph
    pattern: Tangents
    paths: Sequence[str]
    leaves: Sequence[Tensor]
    inputs: Sequence[Tensor]

    def run(self, call: Callable[[], Computed]) -> tuple[Computed, list[Tensor]]:
        """Return what a call computes, and the states of the random generators after it."""
        with restored(self.graph, [*self.leaves, *self.inputs]) as states:
            return call(), states()

    def by_python(self) -> Computed:
        source = self.graph.source
        leaves = [
            x.detach().requires_grad_(meta.requires_grad) for x, meta in zip(self.leaves, source.leaves, strict=True)
        ]
        given = [x.requires_grad_(meta.requires_grad) for x, meta in zip(self._copies(), source.inputs, strict=True)]
        torch.clear_autocast_cache()
        try:
            with torch.set_grad_enabled(source.grad):
                flat, spec = tree.flatten(source.call(leaves, given))
        finally:
            torch.clear_autocast_cache()
        outputs = _checked_outputs(self.graph.result, flat, spec, given)
        found = _named(outputs, given)
        starts, seeds = self._seeds(outputs)
        places = [("leaf", n, x) for n, x in enumerate(leaves)] + [("in", n, x) for n, x in enumerate(given)]
        wanted = {self._title((kind, n)): x for kind, n, x in places if x.requires_grad}
        if self.graph.differentiable and seeds and wanted:
            with DisableAutocast():
                grads = torch.autograd.grad(starts, list(wanted.values()), seeds, allow_unused=True)
            found |= dict(zip(wanted, grads, strict=True))
            found |= {f"{LEFT} {n}": x for n, x in enumerate(source.left()[1])}
        return found

    def by_graph(self, direct: bool) -> Computed:
        graph, given, own = self.graph, self._copies(), list[Tensor | None]()
        with torch.no_grad():
            params = graph.code.views(self.leaves)
            with kernels_only():
                outputs, saved = graph.code.forward(params, *given)
            found = _named(outputs, given)
            _, tangents = self._seeds(outputs)
            variant = graph.variants[self.pattern]
            if not graph.differentiable or variant is None or not tangents:
                return found
            with kernels_only():
                if direct:
                    empty = [self.leaves[n] for n in graph.own]
                    own = [torch.full_like(x, float("nan"), memory_format=torch.contiguous_format) for x in empty]
                    parts = variant.code.direct(params, saved, variant.code.targets(own), *tangents)
                else:
                    parts, grads = variant.code.backward(params, saved, *tangents)
                    own = [grads[n] for n in graph.own]
                found |= {f"{LEFT} {n}": x for n, x in enumerate(parts[variant.count :])}
                return found | {self._title(place): x for place, x in _totals(graph, variant, parts, own).items()}

    def _copies(self) -> list[Tensor]:
        return [copied(x) for x in self.inputs]

    def _seeds(self, outputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs that have gradients, and the gradients to start from."""
        pairs = [
            (outputs[i], strides)
            for i, strides in zip(self.graph.wanted, self.pattern, strict=True)
            if strides is not None
        ]
        return [out for out, _ in pairs], [seed(out, strides) for out, strides in pairs]

    def _title(self, place: Place) -> str:
        kind, number = place
        return f"the gradient of {self.paths[number]}" if kind == "leaf" else f"the gradient of input {number}"


def _checked_outputs(result: GraphResult, flat: Sequence[Any], spec: Any, given: Sequence[Tensor]) -> list[Tensor]:
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


def _totals(graph: Graph, variant: Variant, parts: Any, own: Sequence[Tensor | None]) -> dict[Place, Tensor | None]:
    """The gradient of each leaf and input: the sum of the parts that autograd would add."""
    found: dict[Place, Tensor | None] = {("leaf", n): grad for n, grad in zip(graph.own, own, strict=True)}
    for place, part in zip(graph.edges, variant.arrange(parts), strict=True):
        above = found.get(place)
        found[place] = above + part if above is not None and part is not None else part if above is None else above
    return found


def _named(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Computed:
    both = (("output", outputs), ("what is left in input", inputs))
    return {f"{what} {number}": x.detach() for what, tensors in both for number, x in enumerate(tensors)}


def apart(want: Tensor | None, got: Tensor | None, exact: bool) -> str:
    """Say how the graph's tensor differs from the unit's; empty if it does not, or within the tolerance.

    None is zeros.
    """
    if want is None or got is None:
        known = want if want is not None else got
        if known is None or not known.any():
            return ""
        return f"is zero in one of them, and up to {float(known.abs().max()):.3g} in the other"
    if want.shape != got.shape or want.dtype != got.dtype:
        one, other = (f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (want, got))
        return f"is {one} by Python and {other} in the graph"
    if want.itemsize > 1 and torch.equal(want, got):  # without the memory that the rest takes
        return ""
    return _elements_apart(want, got, exact)


def _elements_apart(want: Tensor, got: Tensor, exact: bool) -> str:
    """Say how the elements of tensors of one shape and dtype differ; see ``apart``."""
    if not (want.is_floating_point() or want.is_complex()):
        count, size = int((want != got).sum()), want.numel()
        few = count <= (0 if exact else max(1, FLIPS * size))
        return "" if few else f"differs in {count} of {size} elements"
    off, most = gap(got, want)
    if math.isinf(off):
        return "is infinite or nan in one of them alone"
    tolerance = 0.0 if exact else LOOSE.get(want.dtype, 0.05)
    return "" if off <= tolerance * most else f"differs by {off:.3g}, where its largest number is {most:.3g}"


def gap(one: Tensor, other: Tensor) -> tuple[float, float]:
    """The largest difference of two tensors' elements, and the largest magnitude of the second; nan equals nan."""
    if one.shape != other.shape:
        return math.inf, 0.0
    if not one.numel():
        return 0.0, 0.0
    # Conversion resolves lazy conjugates, and makes numbers of short formats, which kernels do not compare.
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.detach().to(wide), other.detach().to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    far = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    size = torch.where(b.abs().isfinite(), b.abs(), 0.0)
    return float(far.max()), float(size.max())


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
def restored(graph: Graph, tensors: Sequence[Tensor]) -> Iterator[Callable[[], list[Tensor]]]:
    """Put all random generators back at the end; yields a function that returns the states of torch's."""
    devices = {x.device for x in tensors if x.device.type not in ("cpu", "meta")}
    modules = [(torch.get_device_module(device), device) for device in sorted(devices, key=str)]
    numpy = sys.modules.get("numpy")

    def states() -> list[Tensor]:
        own = [generator.get_state() for generator in (torch.default_generator, *graph.generators)]
        return own + [module.get_rng_state(device) for module, device in modules]

    kept, python = iter(states()), random.getstate()
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        yield states
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        for generator in (torch.default_generator, *graph.generators):
            generator.set_state(next(kept))
        for module, device in modules:
            module.set_rng_state(next(kept), device)


def strays(
    graph: Graph, variant: Variant, params: Any, saved: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> bool:
    """Tell whether a further backward computes something else than the backward that was compared with the unit."""
    found, usual = [], graph.proved
    with kernels_only():
        for one, tangents in ((usual, graph.as_usual(grads)), (variant, [g for g in grads if g is not None])):
            parts, own = one.code.backward(params, list(saved), *tangents)
            found.append(_totals(graph, one, parts, [own[n] for n in graph.own]))
    return any(_finite_parts_differ(usual, found[1][place]) for place, usual in found[0].items())


def proved_parts(
    graph: Graph, variant: Variant, params: Any, saved: Sequence[Tensor], tangents: Sequence[Tensor]
) -> PartedCode:
    """The backward in two parts, after both have computed what the whole one computes.

    Raises:
        UnitError: they compute something else.
    """
    code = variant.code.part()
    with kernels_only():
        parts, own = variant.code.backward(params, list(saved), *tangents)
        first, left = code.first(params, list(saved), *tangents)
        second = code.second(params, left)
    for one, other in zip((*parts, *own), (*first, *second), strict=True):
        if found := apart(one, other, graph.code.backend == "fx"):
            raise UnitError(f"a gradient of graph {graph.number} {found} if its backward runs in two parts")
    return code


def _finite_parts_differ(usual: Tensor | None, got: Tensor | None) -> bool:
    known = usual if usual is not None else got
    if known is None:
        return False
    odd = ~known.isfinite()  # zero times infinity, where zeros stand for no gradient
    one, other = (None if x is None else x.masked_fill(odd, 0) for x in (usual, got))
    return bool(apart(one, other, exact=False))
