"""A backward in two parts: first the gradients of a stage's inputs, which other stages wait for, later those of leaves.

The first part runs the nodes between the outputs and the inputs of a stage. Where a branch to leaves leaves that way,
what arrives at its node is kept; the second part starts there, so that nothing is computed twice (Qi et al., "Zero
bubble pipeline parallelism", 2023).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.schedule.ops import Call

Node = Any
"""A node of autograd's graph, which has no public type."""

Grads = tuple[Tensor | None, ...]


class Branch(NamedTuple):
    """A place where branches to leaves leave the way to the inputs.

    Attributes:
        node: the last node on that way.
        leaves: the leaves that its branches lead to.
        onward: the nodes right below it that are on that way.
    """

    node: Node
    leaves: tuple[Tensor, ...]
    onward: tuple[Node, ...] = ()


class PartedBackward:
    """The backward of one stage and microbatch, in two parts.

    Args:
        values: the outputs of the stage.
        grads: their gradients.
        inputs: the inputs of the stage, leaves that require grad.
        leaves: the leaves whose gradients are wanted, which accumulate in ``grad``.

    Attributes:
        graphs: the second parts of backwards of calls that ran as compiled graphs.
    """

    def __init__(
        self, values: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> None:
        self.values, self.grads = list(values), list(grads)
        self.inputs = [x for x in inputs if x.requires_grad]
        self.branches = _branches(self.values, self.inputs, leaves)
        self.kept: dict[Node, list[Tensor | None]] = {}
        self.graphs: dict[tuple[str, int], Callable[[], None]] = {}
        count = Counter(id(leaf) for branch in self.branches for leaf in branch.leaves)
        self.several = {leaf for leaf, branches in count.items() if branches > 1}

    def of_inputs(self) -> None:
        """Compute the gradients of the inputs, which accumulate in their ``grad``."""
        if not self.inputs:
            return
        hooks = [branch.node.register_prehook(self._keeper(branch.node)) for branch in self.branches]
        for value, grad in zip(self.values, self.grads, strict=True):
            self._keep_root(value, grad)
        torch.autograd.backward(self.values, self.grads, retain_graph=True, inputs=self.inputs)
        for hook in hooks:
            hook.remove()
        self.values, self.grads = [], []

    def of_leaves(self, wanted: Mapping[int, Tensor] | None = None, call: Call | None = None) -> None:
        """Compute the gradients of the leaves, which accumulate in their ``grad``.

        Args:
            wanted: the leaves in question, by identity; None for all that are left.
            call: the call of a unit that reads them. If that ran as a graph, the graph delivers its gradients.
        """
        if call is not None and (graph := self.graphs.pop((call.unit, call.index), None)) is not None:
            graph()
        if self.values:  # nothing goes back to other stages
            leaves = [leaf for branch in self.branches for leaf in branch.leaves]
            if leaves:
                torch.autograd.backward(self.values, self.grads, inputs=leaves)
            self.values, self.grads, self.branches = [], [], []
            return
        here = [b for b in self.branches if wanted is None or any(id(leaf) in wanted for leaf in b.leaves)]
        for branch in here:
            self._run(branch)
        self.branches = [branch for branch in self.branches if not any(branch is one for one in here)]

    def _keep_root(self, value: Tensor, grad: Tensor) -> None:
        """Keep the gradient of an output from which no way leads to the inputs: its node does not run."""
        node = value.grad_fn
        if node is None or not any(branch.node is node for branch in self.branches):
            return
        kept = self.kept.setdefault(node, [])
        kept += [None] * (value.output_nr + 1 - len(kept))
        before = kept[value.output_nr]
        kept[value.output_nr] = grad if before is None else before + grad

    def _keeper(self, node: Node) -> Callable[[Grads], None]:
        def keep(grads: Grads) -> None:
            self.kept[node] = list(grads)  # what was kept of a root is part of it

        return keep

    def _run(self, branch: Branch) -> None:
        """Run the branches to leaves from one node."""
        kept = self.kept.pop(branch.node, [])
        edge = torch.autograd.graph.GradientEdge
        outputs = [(edge(branch.node, at), grad) for at, grad in enumerate(kept) if grad is not None]
        if not outputs:
            return
        edges, grads = zip(*outputs, strict=True)
        once = [leaf for leaf in branch.leaves if id(leaf) not in self.several]
        if once:
            torch.autograd.backward(edges, grads, inputs=once, retain_graph=True)
        again = [leaf for leaf in branch.leaves if id(leaf) in self.several]
        if again:  # other branches lead there, too, some of them below this one, and run by themselves
            hooks = [node.register_prehook(_zeros) for node in branch.onward]
            torch.autograd.backward(edges, grads, inputs=again, retain_graph=True)
            for hook in hooks:
                hook.remove()


def _branches(values: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Branch]:
    """The nodes at which branches to leaves leave the way from the values to the inputs, in the order of the backward.

    Without inputs there is one branch, from the values themselves.
    """
    order, above = _reached([value.grad_fn for value in values if value.grad_fn is not None])
    leading = [(node, leaf) for node in order if (leaf := _accumulated(node, leaves)) is not None]
    if not inputs:
        return [Branch(None, tuple([leaf for _, leaf in leading]))]
    on_the_way = _climbed([node for node in order if _accumulated(node, inputs) is not None], above)
    by_node: dict[Node, list[Tensor]] = {}
    for node, leaf in leading:
        for place in _joins(node, above, on_the_way):
            by_node.setdefault(place, []).append(leaf)
    return [Branch(node, tuple(by_node[node]), _onward(node, on_the_way)) for node in order if node in by_node]


def _onward(node: Node, on_the_way: set[Node]) -> tuple[Node, ...]:
    """The nodes right below one that are on the way to the inputs."""
    return tuple([below for below, _ in node.next_functions if below in on_the_way])


def _zeros(grads: Grads) -> Grads:
    """The gradient of a branch that was cut off."""
    return tuple([None if grad is None else torch.zeros_like(grad) for grad in grads])


def _reached(roots: Sequence[Node]) -> tuple[list[Node], dict[Node, list[Node]]]:
    """All nodes below the roots, these first, and for each the nodes right above it."""
    order, above, stack = dict[Node, None](), dict[Node, list[Node]](), list(reversed(roots))
    while stack:
        node = stack.pop()
        if node in order:
            continue
        order[node] = None
        for below, _ in node.next_functions:
            if below is not None:
                above.setdefault(below, []).append(node)
                stack.append(below)
    return list(order), above


def _accumulated(node: Node, leaves: Sequence[Tensor]) -> Tensor | None:
    """The one of these leaves whose gradient a node accumulates; None if it is none of them."""
    variable = getattr(node, "variable", None)
    return None if variable is None else next((leaf for leaf in leaves if leaf is variable), None)


def _climbed(nodes: Sequence[Node], above: Mapping[Node, Sequence[Node]]) -> set[Node]:
    """These nodes and all above them."""
    found, stack = set[Node](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += above.get(node, ())
    return found


def _joins(node: Node, above: Mapping[Node, Sequence[Node]], on_the_way: set[Node]) -> list[Node]:
    """The first nodes on the way to the inputs above a node that is not on it; the roots where there are none."""
    found, seen, stack = dict[Node, None](), set[Node](), [node]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in on_the_way:
            found[one] = None
            continue
        higher = above.get(one, ())
        if not higher:
            found[one] = None
        stack += higher
    return list(found)
