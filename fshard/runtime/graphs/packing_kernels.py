"""Packing and unpacking as compiled kernels: one pass over memory each, with the bits of PyTorch's ops.

Inductor compiles a kernel for pieces of one length when a format first needs it. What is left of a tensor, formats that
rotate blocks or round at random, and other dtypes than float32 go through PyTorch's ops, which give the same bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fshard.runtime.comm.packing import NIBBLE, PIECE, SMALLEST, Kernel
from fshard.sharding.wire import WireFormat
from fshard.torch_internals import FakeTensorMode, compile_fx_inner, select_decomp_table
from fshard.torch_internals import inductor_config as config


class PackingKernels:
    """The kernels of a step, by what they do and the format, made when they are first asked for."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str, int, int], Kernel] = {}

    def __call__(self, what: str, form: WireFormat, ranges: int = 1) -> Kernel | None:
        """The kernel that does ``"pack"``, ``"unpack"`` or ``"add"`` for a piece; None where there is none."""
        if not form.codes.whole or form.rotate or form.stochastic or PIECE % form.block:
            return None
        key = what, form.name, form.block, ranges
        if key not in self.made:
            self.made[key] = _compiled(what, form, ranges)
        return self.made[key]


def _compiled(what: str, form: WireFormat, ranges: int) -> Kernel:
    """A kernel that takes the rows of a piece, and codes and scales of packed ranges, and writes to some of them."""
    blocks, width = PIECE // form.block, form.block * form.codes.bits // 8
    codes = form.codes.dtype
    mode = FakeTensorMode()
    with torch.no_grad(), mode:
        rows = torch.empty((blocks, form.block), dtype=torch.float32, device="cpu")
        payloads = [torch.empty((blocks, width), dtype=codes, device="cpu") for _ in range(ranges)]
        given = [rows, *payloads, *[rows.new_empty(blocks) for _ in range(ranges)]]
        run, written = _functions(what, form)
        graph = make_fx(run, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    _write(graph, written)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with config.patch({"cpp_wrapper": True}):
        made: Any = compile_fx_inner(graph, fakes, cpp_wrapper=True)
    return lambda rows, payloads, scales: made([rows, *[p.view(codes).view(blocks, width) for p in payloads], *scales])


def _write(graph: fx.GraphModule, written: Sequence[int]) -> None:
    """Let the results be written to these arguments."""
    holders, output = graph.graph.find_nodes(op="placeholder"), graph.graph.output_node()
    results: Any = output.args[0]
    with graph.graph.inserting_before(output):
        for number, result in zip(written, results, strict=True):
            copy = graph.graph.call_function(torch.ops.aten.copy_.default, (holders[number], result))
            copy.meta["val"] = holders[number].meta["val"]
    output.args = ((),)
    output.meta["user_visible_output_idxs"] = []
    graph.recompile()


def _functions(what: str, form: WireFormat) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[int, ...]]:
    """Return what a kernel computes of rows, codes and scales, and the numbers of the arguments that it writes."""
    largest, whole = form.largest, form.codes.bits == 8
    assert largest is not None

    def pack(rows: Tensor, codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        made = rows.abs().amax(1).mul(1 / largest).clamp_min(SMALLEST)
        numbers = (rows / made.unsqueeze(1)).round()
        if whole:
            return numbers.to(torch.int8), made
        low, high = numbers[:, : form.block // 2], numbers[:, form.block // 2 :]
        return (low + high * (2 * NIBBLE) + (NIBBLE + 2 * NIBBLE * NIBBLE)).to(torch.uint8), made

    def value(codes: Tensor, scales: Tensor) -> Tensor:
        if whole:
            numbers = codes.float()
        else:
            numbers = torch.cat([codes & (2 * NIBBLE - 1), codes >> 4], 1).float() - NIBBLE
        return numbers * scales.unsqueeze(1)

    def unpack(rows: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        ranges = len(given) // 2
        values = [value(*pair) for pair in zip(given[:ranges], given[ranges:], strict=True)]
        return (functools.reduce(torch.add, [rows, *values] if what == "add" else values),)

    return (pack, (1, 2)) if what == "pack" else (unpack, (0,))
