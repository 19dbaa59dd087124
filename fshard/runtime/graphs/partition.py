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

from fshard.model.policies import SavePolicy
from fshard.runtime.graphs.trace import Joint, Untraceable

ATEN = torch.ops.aten
SAME = frozenset((ATEN.detach.default, ATEN.alias.default, ATEN.lift_fresh.default))
"""Ops whose result has the values of their argument."""

RESHAPES = frozenset((ATEN.view.default, ATEN._unsafe_view.default))


@dataclass(frozen=True, eq=False)
class Halves:
    """A graph cut in two.

    Attributes:
        joint: the whole graph.
        hoisted: views of parameters, each after its base.
        forward: the nodes of the forward.
        backward: the nodes of the backward.
        saved: the nodes of the forward, inputs among them, whose results the backward reads.
    """

    joint: Joint
    hoisted: list[fx.Node]
    forward: list[fx.Node]
    backward: list[fx.Node]
    saved: list[fx.Node]


def value(node: fx.Node) -> Any:
    """The fake tensor that a node returned in the trace."""
    return node.meta.get("val")


def cut(joint: Joint, policy: SavePolicy | None = None) -> Halves:
    """Tidy a graph up and cut it.

    Args:
        joint: the graph.
        policy: which results are kept, while the backward computes the others again; None keeps what autograd keeps.

    Raises:
        Untraceable: the graph writes to its arguments, communicates, or draws random numbers in its backward.
    """
    _check_ops(joint)
    _tidy(joint.graph)
    _drop_dead(joint)
    hoisted = _hoisted(joint)
    apart = {*joint.leaves, *hoisted}
    outside = {*apart, *joint.inputs, *joint.tangents}
    body = [n for n in joint.graph.nodes if n.op in ("call_function", "get_attr") and n not in outside]
    forward = [node for node in body if node in joint.forward]
    backward = [node for node in body if node not in joint.forward]
    needed = _sources(backward) | set(joint.flat[joint.count :])
    if policy is not None:
        again = _again(needed.intersection(forward), _lasting(forward, policy))
        backward = list(filter(again.__contains__, forward)) + backward
        needed = (needed | _sources(again)) - again
    saved = [n for n in joint.graph.nodes if n in needed and n in joint.forward and n not in apart]
    return Halves(joint, hoisted, forward, backward, saved)


def _lasting(forward: list[fx.Node], policy: SavePolicy) -> set[fx.Node]:
    """The nodes to keep: those that the policy names, and those that would compute something else a second time."""
    written = {_storage(node) for node in forward if not is_pure(node) and isinstance(value(node), Tensor)}
    kept: set[fx.Node] = set()
    for node in forward:
        source = node.all_input_nodes[0] if node.target is operator.getitem else node
        lasting = not is_pure(source) or policy.saves(source.target) or node.op == "get_attr"
        if lasting or (isinstance(value(node), Tensor) and _storage(node) in written):
            kept.add(node)
    return kept


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


def _sources(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {source for node in nodes for source in node.all_input_nodes}


def watched(
    saved: Iterable[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of the inputs and of the outputs that share memory with saved tensors."""
    held = {_storage(node) for node in saved if isinstance(value(node), Tensor)}
    first, second = (tuple(i for i, n in enumerate(nodes) if _storage(n) in held) for nodes in (inputs, outputs))
    return first, second


def _storage(node: fx.Node) -> int:
    return int(value(node).untyped_storage()._cdata)


def is_view(node: fx.Node) -> bool:
    """Whether a node returns one tensor, a view of its argument."""
    if node.op != "call_function" or not isinstance(value(node), Tensor):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    if node.target in RESHAPES:
        return True
    alias = schema.arguments[0].alias_info if schema.arguments else None
    return alias is not None and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


def is_pure(node: fx.Node) -> bool:
    """Whether a node may be dropped if its result is not read."""
    if node.op == "get_attr" or not isinstance(node.target, torch._ops.OpOverload):
        return True
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return not node.target._schema.is_mutable and not random and not _writes_statistics(node)


def _writes_statistics(node: fx.Node) -> bool:
    # Batch normalization writes its running statistics without declaring it.
    return "batch_norm" in str(node.target)


def _check_ops(joint: Joint) -> None:
    """Refuse collectives, random numbers in the backward, and writes to arguments."""
    given = {_storage(node) for node in (*joint.leaves, *joint.inputs)}
    for node in joint.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if "c10d" in node.target.namespace:
            raise Untraceable("it makes collectives of its own, which no graph can hold")
        if node not in joint.forward and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise Untraceable("its backward draws random numbers: checkpointing inside of it draws them again")
        if any(_storage(source) in given for source in _written(node)):
            raise Untraceable("it writes in place to what it was given")


def _written(node: fx.Node) -> Iterable[fx.Node]:
    """The arguments that a node's operator declares to write."""
    schema = node.target._schema  # type: ignore[union-attr]
    for argument, source in zip(schema.arguments if schema.is_mutable else (), node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(source, fx.Node):
            yield source


def _tidy(graph: fx.Graph) -> None:
    """Drop ops that change nothing, and make one view of a chain of views."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in SAME:
            node.replace_all_uses_with(node.args[0])
        elif is_view(node):
            same = next((above for above in _bases(node) if _equal(value(above), value(node))), None)
            if same is not None:
                node.replace_all_uses_with(same)
            elif node.target in RESHAPES:
                _shorten(node)


def _bases(node: fx.Node) -> Iterable[fx.Node]:
    while is_view(node):
        node = node.args[0]  # type: ignore[assignment]
        yield node


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one tensor are the same view."""
    return (
        a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.dtype == b.dtype
        and lazy(a) == lazy(b)
    )


def lazy(x: Tensor) -> tuple[bool, bool]:
    """Whether a tensor is lazily conjugated, and lazily negated: a view may differ from its base in this alone."""
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


def _drop_dead(joint: Joint) -> None:
    for node in reversed(joint.graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and is_pure(node):
            joint.graph.erase_node(node)


def _hoisted(joint: Joint) -> list[fx.Node]:
    known, found = set(joint.leaves), []
    for node in joint.graph.nodes:
        if node.all_input_nodes and is_view(node) and known.issuperset(node.all_input_nodes):
            known.add(node)
            found.append(node)
    return found
