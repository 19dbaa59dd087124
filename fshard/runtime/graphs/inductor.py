"""Graphs compiled by torch's compiler.

A unit's graph is decomposed and cut where a minimal cut of what is kept says (``min_cut_rematerialization_partition``):
cheap pointwise ops are computed again in the backward rather than saved. Both halves are compiled by Inductor. Random
numbers are drawn by the ops that eager PyTorch uses, so that they are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from fshard.runtime.graphs.emit import Code, emit
from fshard.runtime.graphs.partition import Halves, value, watched
from fshard.runtime.graphs.trace import Joint, Untraceable

# Calls from C++ to kernels cost half of those from Python.
SETTINGS = {"fallback_random": True, "cpp_wrapper": True}


def compile_halves(halves: Halves, own: Sequence[int], saved: Sequence[str] | None = None) -> Code:
    """Compile a graph's functions; see ``emit``.

    Raises:
        Untraceable: what is kept would differ from what the forward of another trace keeps.
    """
    joint = halves.joint
    if not joint.forward.isdisjoint(halves.backward):
        # What remat= computes again is not Inductor's choice: such units run as they do with "fx".
        return emit(halves, own, saved)
    if saved is not None:
        raise Untraceable("compiled once, for gradients of the usual strides")
    with config.patch(SETTINGS):
        whole = _decomposed(joint)
        if any(node is not None for node in joint.tangents):
            first, second = min_cut_rematerialization_partition(whole, (), num_fwd_outputs=joint.count)
        else:
            first, second = whole, None
        return _Compiled(joint, first, second, own).code()


def _decomposed(joint: Joint) -> fx.GraphModule:
    """The graph in the ops that Inductor knows, without writes, in the form of a joint graph of AOTAutograd."""
    holders = [*joint.leaves, *joint.inputs, *(node for node in joint.tangents if node is not None)]
    fakes = [value(node) for node in holders]
    run = fx.GraphModule(joint.module, joint.graph)
    primals = len(joint.leaves) + len(joint.inputs)
    with torch.no_grad(), fakes[0].fake_mode:
        plain = [fake.detach() for fake in fakes]
        functional = torch.func.functionalize(lambda *flat: run(*flat), remove="mutations")
        whole = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(*plain)
    for number, node in enumerate(whole.graph.find_nodes(op="placeholder")):
        part = ("primals", number + 1) if number < primals else ("tangents", number - primals + 1)
        node.target = f"{part[0]}_{part[1]}"
        node.name = str(node.target)
    whole.recompile()
    return whole


class _Compiled:
    """The two compiled halves, and how their arguments are made."""

    def __init__(self, joint: Joint, first: fx.GraphModule, second: fx.GraphModule | None, own: Sequence[int]) -> None:
        self.leaves, self.count, self.parts = len(joint.leaves), joint.count, len(joint.places)
        self.own = [i for i in own if joint.grads[i] is not None]
        self.zeros = [n for n, i in enumerate(own) if joint.grads[i] is None]
        self.filled = [n for n, i in enumerate(own) if joint.grads[i] is not None]
        self.present = joint.present
        (flat,) = next(reversed(first.graph.nodes)).args
        kept = list(flat[self.count :])
        holders = {node.name: number for number, node in enumerate(first.graph.find_nodes(op="placeholder"))}
        made = [node for node in dict.fromkeys(kept) if node.name not in holders]
        next(reversed(first.graph.nodes)).args = ([*flat[: self.count], *made],)
        first.recompile()
        self.watched = watched([node for node in kept if node.name not in holders], (), flat[: self.count])[1]
        self.inputs = [n for n in dict.fromkeys(holders[x.name] for x in kept if x.name in holders) if n >= self.leaves]
        place = {node.name: number for number, node in enumerate(made)}
        place |= {f"primals_{n + 1}": len(made) + i for i, n in enumerate(self.inputs)}
        self.first = _compile(first, backward=False)
        self.second: _Half | None = None
        self.order: list[int] = []
        if second is not None:
            self.order = [_origin(node, place, holders) for node in second.graph.find_nodes(op="placeholder")]
            self.second = _compile(second, backward=True)

    # The functions of a ``Code``.

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Sequence[Tensor], list[Any]]:
        out = self.first.run([*params, *inputs])
        saved = [*out[self.count :], *[inputs[i - self.leaves] for i in self.inputs]]
        return out[: self.count], saved

    def backward(self, params: Sequence[Tensor], saved: list[Any], *tangents: Tensor) -> tuple[Any, list[Any]]:
        out = self._backward(params, saved, tangents)
        grads = iter(out[self.parts :])
        return out[: self.parts], [next(grads) if present else None for present in self.present]

    def direct(self, params: Sequence[Tensor], saved: list[Any], into: list[Tensor], *tangents: Tensor) -> Any:
        out = self._backward(params, saved, tangents)
        if self.filled:
            torch._foreach_copy_(into if not self.zeros else [into[n] for n in self.filled], list(out[self.parts :]))
        if self.zeros:
            torch._foreach_zero_([into[n] for n in self.zeros])
        return out[: self.parts]

    def _backward(self, params: Sequence[Tensor], saved: list[Any], tangents: Sequence[Tensor]) -> Any:
        # Numbers below zero count leaves, those from 0 what was saved, and tangents come last, in their order.
        arguments = [saved[n] if n >= 0 else params[-1 - n] for n in self.order if n < _TANGENT]
        saved.clear()
        assert self.second is not None
        return self.second.run([*arguments, *tangents])

    def code(self) -> Code:
        """These as the functions of a graph."""
        watched = tuple(n - self.leaves for n in self.inputs), self.watched
        return Code(tuple, self.forward, self.backward, list, self.direct, "compiled by Inductor", "inductor", watched)


_TANGENT = 1 << 30


def _origin(node: fx.Node, place: dict[str, int], holders: dict[str, int]) -> int:
    """Where an argument of the backward comes from."""
    name = str(node.name)
    if name.startswith("tangents_"):
        return _TANGENT
    return place[name] if name in place else -1 - holders[name]


class _Half:
    """One compiled half. Its first call ends the compiler's accounts; the next go straight to the code."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        self.run: Callable[[list[Any]], Any] = self._first

    def _first(self, arguments: list[Any]) -> Any:
        out = self.compiled(arguments)
        self.run = getattr(self.compiled, "current_callable", None) or self.compiled
        return out


def _compile(module: fx.GraphModule, backward: bool) -> _Half:
    output = module.graph.output_node()
    # Inductor may choose other strides for results that nobody is said to see; the backward was traced with these.
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    wrapper = bool(SETTINGS.get("cpp_wrapper"))
    return _Half(compile_fx_inner(module, fakes, is_backward=backward, cpp_wrapper=wrapper))
