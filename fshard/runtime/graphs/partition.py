"""Cuts a traced graph in two: a forward that returns the tensors its backward needs, and the backward.

The forward keeps what autograd saved, so memory is that of the eager unit. Parameters are not kept: they are gathered
again before the backward, to the same addresses. Views of parameters are made once, when a graph is bound to leaves.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fshard.model.checkpoint_policies import SavePolicy
from fshard.runtime.graphs.trace_unit import Joint, UntraceableUnit
from fshard.torch_internals import OpOverload

ATEN = torch.ops.aten
SAME = frozenset((ATEN.detach.default, ATEN.alias.default, ATEN.lift_fresh.default))
"""Ops whose result has the values of their argument."""

RESHAPES = frozenset((ATEN.view.default, ATEN._unsafe_view.default))


@dataclass(frozen=True, eq=False)
class Halves:
    """A graph cut in two."""

    joint: Joint
    hoisted: list[fx.Node]  # views of parameters, each after its base
    forward: list[fx.Node]
    backward: list[fx.Node]
    saved: list[fx.Node]  # of the forward, inputs among them, that the backward reads


def value(node: fx.Node) -> Any:
    """The fake tensor that a node returned in the trace."""
    return node.meta.get("val")


def cut(joint: Joint, policy: SavePolicy | None = None) -> Halves:
    """Tidy a graph up and cut it. The backward recomputes what the policy does not keep.

    Raises:
        UntraceableUnit: it cannot be cut.
    """
    _check_ops(joint)
    _tidy(joint)
    joint.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or not is_pure(node))
    hoisted = _hoisted(joint)
    apart = {*joint.leaves, *hoisted}
    body = [node for node in joint.graph.nodes if node.op in ("call_function", "get_attr") and node not in apart]
    forward = [node for node in body if node in joint.forward]
    backward = [node for node in body if node not in joint.forward]
    needed = sources(backward) | set(joint.flat[joint.count :])
    if policy is not None:
        again = _again(needed.intersection(forward), _lasting(forward, policy))
        backward = list(filter(again.__contains__, forward)) + backward
        needed = (needed | sources(again)) - again
    saved = [n for n in joint.graph.nodes if n in needed and n in joint.forward and n not in apart]
    return Halves(joint, hoisted, forward, backward, saved)


def _lasting(forward: list[fx.Node], policy: SavePolicy) -> set[fx.Node]:
    """The nodes to keep: those that the policy names, and those that would compute something else a second time."""
    written = _storages(node for node in forward if not is_pure(node))

    def lasting(node: fx.Node) -> bool:
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        once = not is_pure(source) or policy.saves(source.target) or node.op == "get_attr"
        return once or not written.isdisjoint(_storages([node]))

    return set(filter(lasting, forward))


def _again(wanted: set[fx.Node], kept: set[fx.Node]) -> set[fx.Node]:
    """The nodes to compute again, so that the kept results give the wanted ones."""
    found: set[fx.Node] = set()
    stack = [node for node in wanted if node not in kept]
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function" and node not in kept:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def in_two(nodes: Sequence[fx.Node], results: Iterable[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Part the nodes of a backward in those that some results need, and the others; all are needed if any writes."""
    if not all(map(is_pure, nodes)):
        return [*nodes], []
    needed = set(results)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    needed.update(node for node in nodes if node.target is operator.getitem and node.args[0] in needed)
    return [node for node in nodes if node in needed], [node for node in nodes if node not in needed]


def sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose results these nodes read."""
    return {source for node in nodes for source in node.all_input_nodes}


def watched(
    saved: Iterable[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the inputs and of the outputs that share memory with saved tensors."""
    held = _storages(saved)
    first, second = ([i for i, n in enumerate(nodes) if held & _storages([n])] for nodes in (inputs, outputs))
    return tuple(first), tuple(second)


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of those nodes that are tensors."""
    return {value(node).untyped_storage()._cdata for node in nodes if isinstance(value(node), Tensor)}


def is_view(node: fx.Node) -> bool:
    """Tell whether a node returns one tensor, a view of its argument."""
    op = node.target
    views = isinstance(op, OpOverload) and (op.is_view or op in RESHAPES)
    return views and isinstance(value(node), Tensor)


def is_pure(node: fx.Node) -> bool:
    """Tell whether a node may be dropped if its result is not read."""
    if node.op == "get_attr" or not isinstance(node.target, OpOverload):
        return True
    # Batch normalization writes its running statistics without declaring it.
    return not (node.target._schema.is_mutable or draws(node) or "batch_norm" in str(node.target))


def draws(node: fx.Node) -> bool:
    """Tell whether a node draws random numbers. Attention may, and does not without dropout, nor in its backward.

    Some backwards of attention are tagged like draws. They make the mask of the forward again from the seed and offset
    that it has returned (``philox_seed``, ``philox_offset``), and advance no generator.
    """
    op = node.target
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = zip((argument.name for argument in op._schema.arguments), node.args, strict=False)
    known = {argument.name: argument.default_value for argument in op._schema.arguments} | dict(given) | node.kwargs
    return known.get("dropout_p") != 0 and "philox_seed" not in known


def _check_ops(joint: Joint) -> None:
    """Refuse collectives, random numbers in the backward, and writes to arguments."""
    given = _storages([*joint.leaves, *joint.inputs])
    for node in joint.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        if "c10d" in node.target.namespace:
            raise UntraceableUnit("it makes collectives of its own, which no graph can hold")
        if node not in joint.forward and draws(node):
            raise UntraceableUnit("its backward draws random numbers: checkpointing inside of it draws them again")
        if given & _storages(_written(node)):
            raise UntraceableUnit("it writes in place to what it was given")


def _written(node: fx.Node) -> Iterable[fx.Node]:
    """The arguments that a node's operator declares to write."""
    schema = node.target._schema  # type: ignore[union-attr]
    for argument, source in zip(schema.arguments if schema.is_mutable else (), node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(source, fx.Node):
            yield source


def _tidy(joint: Joint) -> None:
    """Drop ops that change nothing, and make one view of a chain of views and one op of equal ones."""
    graph = joint.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in SAME:
            node.replace_all_uses_with(node.args[0])
        elif is_view(node):
            same = next((above for above in _bases(node) if _view(value(above)) == _view(value(node))), None)
            if same is not None:
                node.replace_all_uses_with(same)
            elif node.target in RESHAPES:
                _shorten(node)
    if all(map(is_pure, graph.nodes)):
        _merge(joint)


def _merge(joint: Joint) -> None:
    """Compute once what a half computes twice. Forward derivatives of forward derivatives do."""
    known: dict[Any, fx.Node] = {}
    results = _storages(joint.flat)  # two of them never share memory
    for node in joint.graph.nodes:
        if node.op == "call_function" and isinstance(value(node), Tensor) and results.isdisjoint(_storages([node])):
            args = repr((node.args, sorted(node.kwargs.items())))
            node.replace_all_uses_with(known.setdefault((node.target, node in joint.forward, args), node))


def _bases(node: fx.Node) -> Iterable[fx.Node]:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
        yield node


def _view(x: Tensor) -> tuple[Any, ...]:
    """Return what tells views of one tensor apart."""
    return x.shape, x.stride(), x.storage_offset(), x.dtype, lazy(x)


def lazy(x: Tensor) -> tuple[bool, bool]:
    """Tell whether a tensor is lazily conjugated, and lazily negated: a view may differ from its base in this alone."""
    return x.is_conj(), x.is_neg()


def _shorten(node: fx.Node) -> None:
    """Let a reshape take the base of a chain of reshapes, if the result is the same."""
    base: Any = node.args[0]
    while base.op == "call_function" and base.target in RESHAPES:
        base = base.args[0]
    if base is node.args[0]:
        return
    try:
        with value(base).fake_mode, torch.no_grad():
            direct = value(base).view(value(node).shape)
    except RuntimeError:
        return
    if direct.stride() == value(node).stride():
        node.args = (base, list(value(node).shape))
        node.target = ATEN.view.default


def _hoisted(joint: Joint) -> list[fx.Node]:
    known, found = set(joint.leaves), []
    for node in joint.graph.nodes:
        if node.all_input_nodes and is_view(node) and known.issuperset(node.all_input_nodes):
            known.add(node)
            found.append(node)
    return found
