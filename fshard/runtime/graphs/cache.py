"""Finds the graph of a unit's call: by the unit's structure, and the shapes, strides, dtypes and values given to it."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import TransformError
from fshard.model.changed_buffers import Watch
from fshard.model.exact import Exact
from fshard.model.float8 import rows_of
from fshard.model.remat_function import autocast_state
from fshard.model.unit import Unit
from fshard.runtime.comm.packing import Kernels, no_kernels
from fshard.runtime.engine import Remat
from fshard.runtime.engine.engine import Engine
from fshard.runtime.graphs.graph import Compiler, Graph, compile_graph
from fshard.runtime.graphs.graph_proof import difference
from fshard.runtime.graphs.partition import lazy
from fshard.runtime.graphs.run import Bound, Claim, GraphCall
from fshard.runtime.graphs.surroundings import NOTHING, Surroundings, recorded
from fshard.runtime.graphs.trace_unit import PLAIN, Same, Source, UntraceableUnit, exact, inspect, meta_of
from fshard.sharding.plan import Plan
from fshard.torch_internals import (
    any_autocast,
    dispatch_modes,
    function_modes,
    peek_interpreter_stack,
    saved_tensors_hooks,
    sdp_cudnn,
    sdp_flash,
    sdp_math,
    sdp_mem_efficient,
    sdp_order,
)
from fshard.torch_internals import function_mode_stack as _modes

MANY = 32
"""The most graphs of one unit. A unit whose Python arguments change with every step needs more, and runs eagerly."""

GIVEN_UP = (
    f"it, its arguments and the values that its Python reads took {MANY} forms: pass numbers that change as tensors, "
    f"pad batches of many lengths (buckets=fs.Buckets(fill)), and make units outside of the loss function"
)

TRANSFORMED = "it is called under a transform of torch.func"

DEMANDED = "as it is: its steps were gathered on demand"


@dataclass(eq=False)
class Cache:
    """The graphs of a train step, shared by all its programs.

    A text in the place of a graph says why calls with a key, or of a unit, have none. ``packing`` are the kernels that
    pack what travels in a wire format.
    """

    compiler: Compiler
    packing: Kernels = no_kernels
    graphs: dict[Hashable, list[tuple[Surroundings, Graph | str]]] = field(default_factory=dict)
    count: int = 0
    report: dict[str, dict[Graph | str, None]] = field(default_factory=dict)  # for each unit, what its calls run

    def graph(self, key: Hashable, source: Source) -> tuple[Surroundings, Graph | str]:
        """The graph of a call, or the reason why it has none; and the surroundings that this depends on."""
        known = self.graphs.setdefault(key, [])
        for around, graph in known:
            if around.holds():
                return around, graph if isinstance(graph, str) else graph.refused or graph
        around = NOTHING  # a unit may always run as it is
        try:
            with recorded() as reads:
                result = inspect(source)
            found: Graph | str = compile_graph(source, result, self.compiler, self.count)
            around = Surroundings(source.fn, reads)
            self.count += 1
        except UntraceableUnit as reason:
            found = str(reason)
        except TransformError:  # collectives raise it, rather than run in the trace and never again
            found = "it makes collectives of its own, which no graph can hold"
        except Exception as error:  # whatever a unit's Python, or an operator, raises at tensors without values
            found = f"it cannot be a graph: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        known.append((around, found))
        return around, found

    def text(self) -> str:
        """A line for each unit met so far."""
        lines = []
        for unit, runs in self.report.items():
            used = [run for run in runs if isinstance(run, Graph) and not run.refused]
            told = [run if isinstance(run, str) else run.refused for run in runs if run not in used]
            text = [f"{run.code.backend} graph {run.number}" for run in used]
            text += [f"as it is: {reason}" for reason in dict.fromkeys(told)]
            lines.append(f"{unit}: {'; '.join(text) or DEMANDED}")
        return "\n".join(lines)

    def note(self, unit: str, found: Graph | str) -> None:
        """Record what a unit's call runs."""
        self.report.setdefault(unit, {})[found] = None

    def meet(self, units: Iterable[str]) -> None:
        """Record units, whose calls may never ask for a graph."""
        for unit in units:
            self.report.setdefault(unit, {})


Key = tuple[Any, ...]


@dataclass(eq=False)
class GraphForm:
    """The code that calls with equal arguments and surroundings run: a graph, or the unit's own function."""

    around: Surroundings
    bound: Bound | None = None

    def prove(self, paths: Sequence[str], inputs: Sequence[Tensor]) -> None:
        """Compare the graph with its unit on these tensors. A graph that computes something else is dropped."""
        while self.bound is not None and self.bound.graph.waiting:
            graph = self.bound.graph
            found = graph.refused or difference(graph, graph.waiting[0], paths, self.bound.leaves, inputs)
            if not graph.refused and (changed := self.around.changed()):
                found = f"its Python changes what it reads: {changed}"
                self.around.forget()
            if not found:
                graph.waiting.pop(0)
                continue
            if not graph.refused:
                graph.refuse(found)
            self.bound = None


@dataclass(eq=False, slots=True)
class Site:
    """Forms that earlier calls of one unit ran: the last one, and by key all."""

    key: Key | None = None
    form: GraphForm = field(default_factory=lambda: GraphForm(NOTHING))
    found: dict[Key, list[GraphForm]] = field(default_factory=dict)


@dataclass(eq=False)
class Graphs:
    """The graphs of one program, bound to its engine's leaves."""

    cache: Cache
    plan: Plan
    host: Engine
    claim: Claim
    grads: dict[int, list[Tensor]]  # by group, the views of its flat gradient
    readers: Mapping[int, int]  # by group, how many differentiated calls read it; code outside of units is several
    inner: frozenset[str]  # units that the program differentiates itself
    anchored: bool  # whether the loss depends on tensors other than parameters
    remat: Remat
    sites: dict[str, Site] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {path: (group.id, number) for path, (group, number) in self.plan.places().items()}

    def call(
        self, unit: Unit, name: str, index: int, params: Any, leaves: list[Tensor], paths: Sequence[str], args: Any
    ) -> tuple[bool, Any]:
        """Run a call, if it has a graph: see ``Compiled``."""
        if watcher := _observer():
            self.cache.note(name, watcher)
            return False, None
        site = self.sites.get(name)
        if site is None:
            site = self.sites[name] = Site()
        inputs, key = _quick(args, unit.fn)
        form = site.form
        if key != site.key or not form.around.same():
            known = (form for form in site.found.get(key, ()) if form.around.holds())
            form = next(known, None) or self._form(site, key, unit, name, params, leaves, paths, args)
            site.key, site.form = key, form
        if form.bound is not None and form.bound.graph.waiting:
            form.prove(paths, inputs)
        if form.bound is None:
            return False, None
        return True, GraphCall(form.bound, self.host, self.claim, name, index).run(inputs, self.anchored)

    def transformed(self, name: str) -> None:
        """Record a call under a transform, which runs no graph."""
        self.cache.note(name, TRANSFORMED)

    def _form(
        self, site: Site, key: Key, unit: Unit, name: str, params: Any, leaves: Any, paths: Sequence[str], args: Any
    ) -> GraphForm:
        """Return what calls with a new key run."""
        if sum(map(len, site.found.values())) >= MANY:
            self.cache.note(name, GIVEN_UP)
            return GraphForm(NOTHING)
        around, bound = NOTHING, None
        found: Graph | str = self._reason(name, leaves, paths, args)
        if not found:
            source = self._source(unit, name, params, leaves, paths, args)
            around, found = self.cache.graph((*source.key, key[-1]), source)
        self.cache.note(name, found)
        if isinstance(found, Graph):
            rounded = [x for leaf in leaves for x in rows_of(leaf) or ()]
            bound = Bound(found, [*leaves, *rounded], [self.places[path] for path in paths], self.grads)
            if found.source.fn is not unit.fn:
                around = Surroundings(unit.fn, around.reads)  # an equal unit reads values of its own
        form = GraphForm(around, bound)
        site.found.setdefault(key, []).append(form)
        return form

    def _source(
        self, unit: Unit, name: str, params: Any, leaves: list[Tensor], paths: Sequence[str], args: Any
    ) -> Source:
        values, spec = tree.flatten(args)
        grad = torch.is_grad_enabled()
        rounded = {n: rows for n, leaf in enumerate(leaves) if (rows := rows_of(leaf)) is not None}
        metas = tuple(meta_of(x, grad) for x in (*leaves, *(x for rows in rounded.values() for x in rows)))
        shared = [n for n, path in enumerate(paths) if self.readers.get(self.places[path][0], 0) > 1]
        return Source(
            fn=unit.fn,
            params=tree.flatten(params)[1],
            args=spec,
            leaves=metas,
            shared=frozenset(n for n in shared if metas[n].requires_grad),
            values=tuple(meta_of(x, grad) if isinstance(x, Tensor) else x for x in _without_repeats(values)),
            grad=grad,
            policy=self.remat.of(name) if grad else None,
            rows=tuple(rounded),
        )

    def _reason(self, name: str, leaves: list[Tensor], paths: Sequence[str], args: Any) -> str:
        """Say why a call cannot be a graph, whatever its unit computes; empty if it can."""
        if name in self.inner:
            return "the program differentiates it itself, inside of the loss"
        values = tree.leaves(args)
        if len(set(paths)) < len(paths) or any(x is leaf for x in values for leaf in leaves):
            return "it is given a leaf twice, so that gradients would have to be added"
        odd = next((x for x in values if not isinstance(x, PLAIN) and not _ordinary(x)), None)
        if odd is None:
            return ""
        if isinstance(odd, Tensor) and any(lazy(odd)):
            return "an argument is conjugated or negated lazily (call resolve_conj() or resolve_neg() on it)"
        kind = type(odd).__name__
        hint = " (call models of transformers with use_cache=False)" if kind.endswith("Cache") else ""
        return f"an argument is a {kind}, neither a plain tensor nor a plain Python value{hint}"


def _without_repeats(values: Sequence[Any]) -> list[Any]:
    """These values, with ``Same`` for each repeated tensor."""
    places: dict[int, int] = {}
    found: list[Any] = []
    for value in values:
        repeated = id(value) in places
        if isinstance(value, Tensor) and not repeated:
            places[id(value)] = len(places)
        found.append(Same(places[id(value)]) if repeated else value)
    return found


def _ordinary(x: Any) -> bool:
    """Tell whether a value is a plain strided tensor."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided and not x.is_quantized
    return plain and not (x.is_conj() or x.is_neg())


def _quick(args: tuple[tuple[Any, ...], dict[str, Any]], function: Any) -> tuple[Sequence[Tensor], Key]:
    """The tensors among the arguments of a call, and the key of its graph."""
    flags = (torch.is_grad_enabled(), autocast_state() if any_autocast() else None, *_settings())
    positional, keywords = args
    if not keywords and (len(positional) < 2 or len(set(map(id, positional))) == len(positional)):
        shapes: list[Any] = [function]
        for x in positional:
            if type(x) is not Tensor or x.layout is not torch.strided or x.is_conj() or x.is_neg():
                break
            shapes.append((x.shape, x.stride(), x.dtype, x.device, x.requires_grad))
        else:
            return positional, (*shapes, flags)
    values, spec = tree.flatten(args)
    values = _without_repeats(values)
    key = [
        (type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if _ordinary(x) else exact(x) for x in values
    ]
    return [x for x in values if isinstance(x, Tensor)], (function, spec, *key, flags)


def _settings() -> Key:
    """The settings of torch that decide which ops a function dispatches to."""
    return (
        torch.get_default_dtype(),
        function_modes(),
        sdp_flash(),
        sdp_mem_efficient(),
        sdp_math(),
        sdp_cudnn(),
        *sdp_order(),
    )


def _observer() -> str:
    """Return what observes single ops, and so must see the unit's own; empty if there is nothing."""
    if peek_interpreter_stack() is not None:
        return TRANSFORMED
    if saved_tensors_hooks(False) is not None:
        return "it is called under torch.utils.checkpoint, or under other hooks on saved tensors"
    if dispatch_modes() > 0:
        return "it is called under a TorchDispatchMode"
    if function_modes() > 0:
        modes = [mode for mode in _modes() if not isinstance(mode, (Watch, Exact))]
        return f"it is called under a TorchFunctionMode: {type(modes[0]).__name__}" if modes else ""
    return ""
