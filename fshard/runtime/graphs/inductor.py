"""Compiles graphs by torch's compiler.

A unit's graph is decomposed, and a minimal cut chooses the tensors to keep (``min_cut_rematerialization_partition``):
the backward computes cheap pointwise ops again instead of saving their results. Inductor compiles both halves. Random
numbers come from the ops that eager PyTorch uses, so they are the same.

A backward writes gradients of leaves where they belong, in the flat gradient. A product of matrices goes there by an op
that Inductor calls as it calls its own products, with the memory as ``out=``. Its own kernels write
there what they compute. What other operators compute is returned, and copied.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fshard.runtime.engine.fake_fallback import quiet
from fshard.runtime.graphs.emit import GraphCode, PartedCode, emit
from fshard.runtime.graphs.partition import ATEN, Halves, in_two, is_view, sources, value, watched
from fshard.runtime.graphs.trace_unit import Joint, UntraceableUnit
from fshard.torch_internals import (
    OpOverload,
    compile_fx_inner,
    foreach_copy_,
    foreach_zero_,
    inductor_ir,
    min_cut_rematerialization_partition,
    register_lowering,
    select_decomp_table,
)
from fshard.torch_internals import inductor_config as config


def write_gradients(backward: fx.GraphModule, parts: int) -> tuple[fx.GraphModule, list[int], list[Tensor]]:
    """A graph that writes its results from number ``parts`` on to further arguments, one for each of them.

    Returns:
        The graph; the numbers, counted from ``parts``, of the results that it returns, behind the first ones; and what
        the further arguments are like.
    """
    graph = copy.deepcopy(backward.graph)
    output = graph.output_node()
    flat: Any = output.args[0]
    kept, products, last = [], list[fx.Node](), graph.find_nodes(op="placeholder")[-1]
    for number, node in enumerate(flat[parts:]):
        with graph.inserting_after(last):
            last = into = graph.placeholder(f"into_{number}")
        like = value(node)
        with like.fake_mode:
            into.meta["val"] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        once = flat.count(node) == 1
        if once and node.target is ATEN.mm.default and len(node.users) == 1:
            products.append(node)
            with graph.inserting_before(node):
                graph.call_function(product_into(), (*node.args, into))
        elif once and _compiled(node):
            with graph.inserting_before(output):
                graph.call_function(ATEN.copy_.default, (into, node))
        else:
            kept.append(number)
    output.args = ([*flat[:parts], *[flat[parts + number] for number in kept]],)
    for node in products:
        graph.erase_node(node)
    return fx.GraphModule(backward, graph), kept, list(map(value, flat[parts:]))


def _compiled(node: fx.Node) -> bool:
    """Tell whether a kernel of Inductor's computes a result."""
    while is_view(node):
        node = node.all_input_nodes[0]
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    return node.target is ATEN.sum.dim_IntList or torch.Tag.pointwise in tags


@functools.cache
def product_into() -> OpOverload:
    """The op ``fshard::product_into(a, b, out)``: the product of two matrices, written to a third."""
    library: Any = torch.library.Library("fshard", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("product_into(Tensor a, Tensor b, Tensor(a!) out) -> ()")
    library.impl("product_into", _product_into, "CompositeExplicitAutograd")
    op: OpOverload = torch.ops.fshard.product_into.default
    op._library = library  # type: ignore[attr-defined]  # it lasts as long as the op
    register_lowering(op, type_promotion_kind=None)(_lowered)
    return op


def _product_into(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def _lowered(a: Any, b: Any, out: Any) -> None:
    """Lower the op as Inductor does ``mm``, with memory that is given and not allocated."""
    ir = inductor_ir
    inputs = [ir.ExternKernel.realize_input(x) for x in (a, b)]
    out.realize()
    kernel = ir.ExternKernelOut(
        layout=ir.MutationLayoutSHOULDREMOVE(out),
        inputs=inputs,
        python_kernel_name="extern_kernels.mm",
        cpp_kernel_name="at::mm_out",
        op_overload=ATEN.mm.out,
    )
    kernel.output_view = ir.ReinterpretView(data=out.data, layout=out.get_layout())


SETTINGS: Mapping[str, bool] = {"fallback_random": True}


def compile_halves(halves: Halves, own: Sequence[int], saved: Sequence[str] | None = None) -> GraphCode:
    """Compile a graph's functions; see ``emit``. ``UntraceableUnit`` where another trace decides what is kept."""
    joint = halves.joint
    if not joint.forward.isdisjoint(halves.backward):
        # remat= says what is computed again, and Inductor would choose for itself: such units run as with "fx".
        return emit(halves, own, saved)
    if saved is not None:
        raise UntraceableUnit("compiled once, for gradients of the usual strides")
    with _settings(joint):
        whole = _decomposed(joint)
        if any(node is not None for node in joint.tangents):
            first, second = min_cut_rematerialization_partition(whole, (), num_fwd_outputs=joint.count)
        else:
            first, second = whole, None
        return _Compiled(joint, first, second, own).code()


def _settings(joint: Joint) -> Any:
    return config.patch({**SETTINGS, "cpp_wrapper": _from_cpp(joint)})


def _decomposed(joint: Joint) -> fx.GraphModule:
    """The graph in ops that Inductor knows, without writes, in the form of a joint graph of AOTAutograd."""
    holders = [*joint.leaves, *joint.inputs, *(node for node in joint.tangents if node is not None)]
    fakes = [value(node) for node in holders]
    run = fx.GraphModule(joint.module, joint.graph)
    primals = len(joint.leaves) + len(joint.inputs)
    with quiet(), torch.no_grad(), fakes[0].fake_mode:
        plain = [fake.detach() for fake in fakes]
        functional = torch.func.functionalize(lambda *flat: run(*flat), remove="mutations")
        whole = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(*plain)
    for number, node in enumerate(whole.graph.find_nodes(op="placeholder"), 1):
        node.name = node.target = f"primals_{number}" if number <= primals else f"tangents_{number - primals}"
    whole.recompile()
    return whole


def _from_cpp(joint: Joint) -> bool:
    """Tell whether kernels are called from C++, which takes the host half the time of calls from Python.

    Not on CUDA, where that needs the headers of its toolkit, and compiles twice. Not measured there yet.
    """
    return all(value(node).device.type == "cpu" for node in (*joint.leaves, *joint.inputs))


class _Compiled:
    """The two compiled halves, and the order of their arguments."""

    def __init__(self, joint: Joint, first: fx.GraphModule, second: fx.GraphModule | None, own: Sequence[int]) -> None:
        self.leaves, self.count, self.parts = len(joint.leaves), joint.count, len(joint.parts)
        self.filled = [n for n, i in enumerate(own) if joint.present[i]]
        self.zeros = [n for n, i in enumerate(own) if not joint.present[i]]
        self.present = joint.present
        output = first.graph.output_node()
        flat: Any = output.args[0]
        holders = {node.name: number for number, node in enumerate(first.graph.find_nodes(op="placeholder"))}
        kept = dict.fromkeys(flat[self.count :])
        given = [holders[node.name] for node in kept if node.name in holders]
        made = [node for node in kept if node.name not in holders]
        output.args = ([*flat[: self.count], *made],)
        first.recompile()
        self.watched = watched(made, (), flat[: self.count])[1]
        self.inputs = [number for number in given if number >= self.leaves]
        self.first = _Half(first, backward=False)
        self.order: list[int] = []
        if second is not None:
            names = [*(node.name for node in made), *(f"primals_{n + 1}" for n in self.inputs)]
            self.order = _order(second, holders, names)
            self.two = functools.partial(_in_two, second, self.parts, joint)
            written, self.copied, self.like = write_gradients(second, self.parts)
            self.second = _Half(written, backward=True)

    # The functions of a ``Code``.

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Sequence[Tensor], list[Any]]:
        out = self.first.run([*params, *inputs])
        saved = [*out[self.count :], *[inputs[i - self.leaves] for i in self.inputs]]
        return out[: self.count], saved

    def backward(self, params: Sequence[Tensor], saved: list[Any], *tangents: Tensor) -> tuple[Any, list[Any]]:
        made = [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in self.like]
        out = self._backward(params, saved, tangents, made)
        grads = iter(made)
        return out, [next(grads) if present else None for present in self.present]

    def direct(self, params: Sequence[Tensor], saved: list[Any], into: list[Tensor], *tangents: Tensor) -> Any:
        out = self._backward(params, saved, tangents, self._present(into))
        self._zero(into)
        return out

    def _present(self, into: list[Tensor]) -> list[Tensor]:
        return [into[n] for n in self.filled] if self.zeros else into

    def _zero(self, into: list[Tensor]) -> None:
        if self.zeros:
            foreach_zero_([into[n] for n in self.zeros])

    def _backward(self, params: Sequence[Tensor], saved: list[Any], tangents: Sequence[Tensor], into: Any) -> Any:
        out = self.second.run([*self._arguments(params, saved, tangents), *into])
        if self.copied:
            foreach_copy_([into[n] for n in self.copied], list(out[self.parts :]))
        return out[: self.parts]

    def _arguments(self, params: Sequence[Tensor], saved: list[Any], tangents: Sequence[Tensor]) -> list[Tensor]:
        arguments = [saved[n] if n >= 0 else params[-1 - n] for n in self.order]  # then come tangents
        saved.clear()
        return [*arguments, *tangents]

    def part(self) -> PartedCode:
        """Compile the backward in two parts."""
        one, other, given = self.two()

        def first(params: Sequence[Tensor], saved: list[Any], *tangents: Tensor) -> tuple[Any, list[Any]]:
            arguments = self._arguments(params, saved, tangents)
            left = [arguments[n] for n in given]
            out = one.run(arguments)
            return out[: self.parts], [*left, *out[self.parts :]]

        def second(params: Sequence[Tensor], left: list[Any]) -> list[Tensor | None]:
            grads = iter(_emptied(other, left))
            return [next(grads) if present else None for present in self.present]

        def direct(params: Sequence[Tensor], left: list[Any], into: list[Tensor]) -> tuple[()]:
            if self.filled:
                foreach_copy_(self._present(into), _emptied(other, left))
            self._zero(into)
            return ()

        return PartedCode(first, second, list, direct)

    def code(self) -> GraphCode:
        """These as the functions of a graph."""
        watched = tuple(n - self.leaves for n in self.inputs), self.watched
        return GraphCode(
            tuple,
            self.forward,
            self.backward,
            list,
            self.direct,
            "compiled by Inductor",
            "inductor",
            watched,
            self.part,
        )


def _order(backward: fx.GraphModule, leaves: Mapping[str, int], saved: Sequence[str]) -> list[int]:
    """Return what a backward takes before the tangents.

    Numbers below zero count leaves, those from 0 what was saved.
    """
    place = {name: -1 - number for name, number in leaves.items()}
    place |= {name: number for number, name in enumerate(saved)}
    taken = (node.name for node in backward.graph.find_nodes(op="placeholder"))
    return [place[name] for name in taken if not name.startswith("tangents_")]


def _in_two(backward: fx.GraphModule, parts: int, joint: Joint) -> tuple["_Half", "_Half", list[int]]:
    """Compile a backward in two parts.

    Returns:
        Both, and the numbers of the arguments of the first that the second takes, too, before what the first leaves.
    """
    holders = backward.graph.find_nodes(op="placeholder")
    flat: Any = backward.graph.output_node().args[0]
    body = [node for node in backward.graph.nodes if node.op not in ("placeholder", "output")]
    early, late = in_two(body, flat[:parts])
    read = [node for node in backward.graph.nodes if node in {*sources(late), *flat[parts:]} and node not in late]
    given = [number for number, node in enumerate(holders) if node in read]
    made = [node for node in read if node.op != "placeholder"]
    with _settings(joint):
        one = _Half(_cut_out(backward, holders, early, [*flat[:parts], *made]), backward=True)
        other = _Half(_cut_out(backward, [*[holders[n] for n in given], *made], late, flat[parts:]), backward=True)
    return one, other, given


def _cut_out(
    module: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """A graph of some nodes of another one."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple([copies[node] for node in outputs]))
    return fx.GraphModule(module, graph)


def _emptied(half: "_Half", left: list[Any]) -> Any:
    """Run the second part of a backward on what the first one left, which it lets go of."""
    arguments = [*left]
    left.clear()
    return half.run(arguments)


class _Half:
    """One compiled half. The first call goes through the compiler's bookkeeping; later ones go to the code."""

    def __init__(self, module: fx.GraphModule, backward: bool) -> None:
        output = module.graph.output_node()
        # Inductor may choose other strides for results that no user sees; the backward was traced with these.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        wrapper = config.cpp_wrapper
        with quiet():
            self.compiled: Any = compile_fx_inner(module, fakes, is_backward=backward, cpp_wrapper=wrapper)
        self.run: Callable[[list[Any]], Any] = self._first

    def _first(self, arguments: list[Any]) -> Any:
        out = self.compiled(arguments)
        self.run = getattr(self.compiled, "current_callable", None) or self.compiled
        return out
