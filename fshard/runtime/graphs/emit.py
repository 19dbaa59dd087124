"""Writes a graph as straight-line Python: one statement an op, and every tensor is dropped after its last use.

Calling an op through ``torch.ops`` costs about twice what its ordinary Python binding does. The code calls a binding
where a trial on fake tensors shows that it dispatches to exactly this op with exactly these arguments.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fshard.runtime.engine.fake_fallback import quiet
from fshard.runtime.graphs.partition import ATEN, Halves, in_two, is_view, lazy, sources, value, watched
from fshard.runtime.graphs.trace_unit import Joint
from fshard.torch_internals import FakeTensor, OpOverload, TorchDispatchMode, foreach_copy_, foreach_zero_, nn_operators

TARGETS = frozenset((ATEN.mm.default, ATEN.sum.dim_IntList))
"""Ops that can write their result into a gradient with the same bits: they have a kernel for ``out=``."""

Run = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class PartedCode:
    """A backward in two parts. ``K`` holds what the first part leaves for the second one."""

    first: Run  # (P, R, *tangents) -> (parts, K)
    second: Run  # (P, K) -> gradients of leaves
    targets: Run  # (views of the flat gradient) -> G
    direct: Run  # (P, K, G): gradients go into the flat gradient


@dataclass(frozen=True, eq=False)
class GraphCode:
    """A graph as functions. ``P`` is the result of ``views``; ``R`` holds the tensors that ``forward`` saved."""

    views: Run  # (leaves) -> P: the leaves, and the views of them that the graph uses
    forward: Run  # (P, *inputs) -> (outputs, R)
    backward: Run  # (P, R, *tangents) -> (parts, gradients of leaves)
    targets: Run  # (views of the flat gradient) -> G
    direct: Run  # (P, R, G, *tangents) -> parts: gradients go into the flat gradient
    text: str  # the source of all of them
    backend: str  # "fx" or "inductor"
    watched: tuple[tuple[int, ...], tuple[int, ...]]  # the inputs and the outputs whose memory R shares, by number
    part: Callable[[], PartedCode]  # writes the backward in two parts


class Writer:
    """Source under construction, with the objects that it names."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.functions: list[str] = []

    def constant(self, thing: Any, hint: str = "c") -> str:
        """A name for an object."""
        for name, held in self.names.items():
            if held is thing or (type(thing) is type(held) is list and repr(held) == repr(thing)):
                return name
        self.names[name := f"{hint}_{len(self.names)}"] = thing
        return name

    def literal(self, argument: Any) -> str:
        """An argument of a node as source."""
        if isinstance(argument, fx.Node):
            return argument.name
        if isinstance(argument, (list, tuple)):
            if any(isinstance(x, fx.Node) for x in argument):
                return f"[{', '.join(map(self.literal, argument))}]"
            return self.constant(list(argument))
        if argument is None or isinstance(argument, (bool, int, str)):
            return repr(argument)
        return self.constant(argument)

    def function(self, name: str, arguments: list[str], body: list[str], result: str) -> None:
        """Add a function."""
        self.functions.append(name)
        self.lines.append(f"def {name}({', '.join(arguments)}):")
        self.lines += [f"    {line}" for line in [*body, f"return {result}"]]

    def call(self, node: fx.Node, out: str = "") -> str:
        """A node as an expression."""
        arguments = [self.literal(a) for a in node.args] + [f"{k}={self.literal(a)}" for k, a in node.kwargs.items()]
        if out:
            arguments.append(f"out={out}")
        return f"{self.constant(binding(node), 'f')}({', '.join(arguments)})"


def emit(halves: Halves, own: Sequence[int], saved: Sequence[str] | None = None) -> GraphCode:
    """Write a graph's functions.

    ``own`` are the numbers of the leaves that are not shared and require grad, in the order of the flat gradients;
    ``saved`` the names of what the forward of another trace of this unit saved, None for this trace's own.
    """
    saved = _names(halves.saved) if saved is None else saved
    joint, writer = halves.joint, Writer(halves.joint.module)
    used = sources([*halves.forward, *halves.backward]).union(joint.flat)
    kept = [node for node in (*joint.leaves, *halves.hoisted) if node in used]
    hoisted = [f"{node.name} = {writer.call(node)}" for node in halves.hoisted]
    writer.function("views", ["L"], [f"{_tuple(joint.leaves)} = L", *hoisted], _tuple(kept))
    bind = [f"{_tuple(kept)} = P"] if kept else []
    body = _body(writer, halves.forward, [*joint.outputs, *halves.saved])
    result = f"{_tuple(joint.outputs)}, [{', '.join(_names(halves.saved))}]"
    writer.function("forward", ["P", *_names(joint.inputs)], bind + body, result)
    tangents = _names(node for node in joint.tangents if node is not None)
    held = list(bind)
    bind += [f"{_join(saved)} = R", "R.clear()"] if saved else []
    body = _body(writer, halves.backward, joint.flat[joint.count :], freed=halves.saved)
    writer.function("backward", ["P", "R", *tangents], bind + body, f"{_tuple(joint.parts)}, {_grads(joint)}")
    direct = _Direct(halves.backward, joint.parts, halves.saved)
    _direct(writer, joint, direct, ["P", "R", "G", *tangents], bind, own)
    code, text = _functions(writer)
    shares = watched(halves.saved, joint.inputs, joint.outputs)
    part = functools.partial(_parted, halves, own, tangents, held, bind)
    return GraphCode(**code, text=text, backend="fx", watched=shares, part=part)


def _functions(writer: Writer) -> tuple[dict[str, Run], str]:
    """The functions that were written, by name, and their text."""
    text = "\n".join(writer.lines)
    space = dict(writer.names)
    exec(compile(text, "<unit graph>", "exec"), space)
    return {name: space[name] for name in writer.functions}, text


def _grads(joint: Joint) -> str:
    return f"[{', '.join(g.name if g is not None else 'None' for g in joint.grads)}]"


def _parted(halves: Halves, own: Sequence[int], tangents: list[str], params: list[str], bind: list[str]) -> PartedCode:
    """Write a backward in two parts, of which the first has the nodes that gradients of inputs need, and no others."""
    joint, writer = halves.joint, Writer(halves.joint.module)
    early, late = in_two(halves.backward, joint.parts)
    grads = [grad for grad in joint.grads if grad is not None]
    there = {*joint.leaves, *halves.hoisted, *late}
    left = [node for node in joint.graph.nodes if node in {*sources(late), *grads} and node not in there]
    body = _body(writer, early, [*joint.parts, *left], freed=halves.saved)
    result = f"{_tuple(joint.parts)}, [{', '.join(_names(left))}]"
    writer.function("first", ["P", "R", *tangents], bind + body, result)
    bind = params + ([f"{_tuple(left)} = K", "K.clear()"] if left else [])
    writer.function("second", ["P", "K"], bind + _body(writer, late, grads, freed=left), _grads(joint))
    _direct(writer, joint, _Direct(late, (), left), ["P", "K", "G"], bind, own)
    return PartedCode(**_functions(writer)[0])


class _Direct(NamedTuple):
    """A backward, or its second part, that writes gradients into the flat gradients: its nodes, results and inputs."""

    nodes: Sequence[fx.Node]
    parts: Sequence[fx.Node]
    freed: Sequence[fx.Node]


def _direct(
    writer: Writer, joint: Joint, what: _Direct, arguments: list[str], bind: list[str], numbers: Sequence[int]
) -> None:
    """Write the function ``direct``, and ``targets``, the views that it writes to."""
    grads, computed = joint.grads, frozenset(what.nodes)
    roots: dict[fx.Node, str] = {}
    views: dict[str, str] = {}
    copied: dict[str, fx.Node] = {}
    zeros: list[str] = []
    for place, number in enumerate(numbers):
        grad, name = grads[number], f"G{number}"
        root = None if grad is None else _root(grad, joint)
        views[name] = f"gs[{place}]"
        if grad is None:
            zeros.append(name)
        elif root in computed and root not in roots:
            roots[root] = name
            views[name] += f".view({tuple(value(root).shape)})"
        else:
            copied[name] = grad
    names = _join(list(views))
    writer.function("targets", ["gs"], [f"{name} = {view}" for name, view in views.items()], names)
    dropped = {node for root in roots for node in _chain(root)}
    nodes = [node for node in what.nodes if node not in dropped]
    lines = [f"{names} = G"] if views else []
    lines += bind + _body(writer, nodes, [*what.parts, *copied.values()], roots, what.freed)
    if copied:
        into, given = ", ".join(copied), ", ".join(_names(copied.values()))
        lines.append(f"{writer.constant(foreach_copy_, 'f')}([{into}], [{given}])")
    if zeros:
        lines.append(f"{writer.constant(foreach_zero_, 'f')}([{', '.join(zeros)}])")
    writer.function("direct", arguments, lines, _tuple(what.parts))


def _root(grad: fx.Node, joint: Joint) -> fx.Node | None:
    """The op that can write this gradient into the flat gradient; None if another op reads its result."""
    node = grad
    while is_view(node) and len(node.users) == 1:
        node = node.args[0]  # type: ignore[assignment]
    whole = value(node)
    fits = node.target in TARGETS and len(node.users) == 1 and joint.flat.count(grad) == 1 and node not in joint.forward
    if not fits or value(grad).dtype != whole.dtype or lazy(value(grad)) != lazy(whole):
        return None
    alike = whole.is_contiguous() and value(grad).is_contiguous() and whole.numel() == value(grad).numel()
    return node if alike else None


def _chain(root: fx.Node) -> Iterable[fx.Node]:
    """The views of a node, up to the end of the graph."""
    node = root
    while True:
        (node,) = node.users
        if node.op == "output":
            return
        yield node


def _names(nodes: Iterable[fx.Node]) -> list[str]:
    return [node.name for node in nodes]


def _tuple(nodes: Iterable[fx.Node]) -> str:
    return _join(_names(nodes))


def _join(names: Sequence[str]) -> str:
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"


def _body(
    writer: Writer,
    nodes: Sequence[fx.Node],
    kept: Iterable[fx.Node],
    places: dict[fx.Node, str] | None = None,
    freed: Iterable[fx.Node] = (),
) -> list[str]:
    """The statements of some nodes, which drop tensors that only these nodes use."""
    places, lasting, own = places or {}, set(kept), {*nodes, *freed}
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last.update(dict.fromkeys(node.all_input_nodes, node))
    lines: list[str] = []
    unpacked: set[fx.Node] = set()
    for node in nodes:
        if node in unpacked:
            continue
        line, picked = _statement(writer, node, places, own)
        lines.append(line)
        unpacked.update(picked)
        gone = [x.name for x in node.all_input_nodes if last[x] is node and x in own and x not in lasting]
        if gone:
            lines.append(f"del {', '.join(gone)}")
    return lines


def _statement(
    writer: Writer, node: fx.Node, places: dict[fx.Node, str], own: set[fx.Node]
) -> tuple[str, Iterable[fx.Node]]:
    """A node as a statement, and the nodes that pick results of it, which the statement unpacks."""
    if node in places:
        return writer.call(node, places[node]), ()
    if node.op == "get_attr":
        return f"{node.name} = {writer.constant(getattr(writer.module, str(node.target)), 'k')}", ()
    if node.target is operator.getitem:
        return f"{node.name} = {node.args[0]}[{node.args[1]!r}]", ()
    if picks := _picks(node, own):
        names = [picks[i].name if i in picks else "_" for i in range(len(value(node)))]
        return f"{_join(names)} = {writer.call(node)}", picks.values()
    return f"{node.name} = {writer.call(node)}", ()


def _picks(node: fx.Node, own: set[fx.Node]) -> dict[int, fx.Node] | None:
    """By number, the nodes that pick results of a node with several; None if it is read in other ways too."""
    found = {}
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] in found:
            return None
        if user in own:
            found[user.args[1]] = user
    return found if found and isinstance(value(node), (tuple, list)) else None  # type: ignore[return-value]


class _Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def binding(node: fx.Node) -> Run:
    """The cheapest callable that does what a node's op does."""
    target = node.target
    if not isinstance(target, OpOverload):
        return target  # type: ignore[return-value]
    name = target._schema.name.partition("::")[2]
    spaces = (torch, nn_operators, Tensor) if target.namespace == "aten" else ()
    found = (getattr(space, name, None) for space in spaces)
    return next((run for run in found if run is not None and _same(run, node)), target._op)


def _same(run: Run, node: fx.Node) -> bool:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    fakes = [value(source) for source in node.all_input_nodes]
    mode = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), None)
    if mode is None or torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return False
    seen = _Seen()
    try:
        with quiet(), torch.no_grad(), mode, seen:
            run(*args, **kwargs)
    except Exception:  # whatever a binding raises at arguments that are not its own
        return False
    return _alike(seen.calls, [(node.target, args, kwargs)])


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and a == b)
