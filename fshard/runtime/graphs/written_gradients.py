"""Lets a backward that Inductor compiles write gradients of leaves where they belong, in the flat gradient.

A product of matrices goes there by an op that Inductor calls as it calls its own products, with the memory as ``out=``.
What a kernel of Inductor's computes, that kernel writes there. What other operators compute is returned, and copied.
"""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, fx

from fshard.runtime.graphs.partition import ATEN, is_view, value
from fshard.torch_internals import OpOverload, inductor_ir, register_lowering


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
