"""Attention with its logsumexp: kernels and masks against the definition, and the memory that the ring takes."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import parallel
from fshard.collectives.scope import resolve
from fshard.parallel import attention as module
from fshard.parallel.attention import AttentionMask, Ring, attend, attend_backward, visible
from fshard.parallel.attention_kernels import CPU_FLASH, CUDA_FLASH, EFFICIENT, SCORES, AttentionKernel, kernel_for
from fshard.parallel.ring_functions import Attention, RingGradients
from tests.parallel.test_functions import draw

PLAIN = SDPBackend.MATH


def defined(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor, scale: float, lse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Output, logsumexp and gradients by the definition; a query that sees nothing has the output 0.

    With ``lse`` the keys are a part of all, and the output is given as zeros: what a backward of that part gets.
    """
    k, v = (x.detach().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    sums = scores.logsumexp(-1)
    weights = (scores - (sums if lse is None else lse).nan_to_num(neginf=0.0).unsqueeze(-1)).exp()
    out = weights @ v
    inner = grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    back = weights * inner * scale
    return out, sums, back @ k, back.mT @ q, weights.mT @ grad


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_attention_under_any_mask_is_its_definition(data: st.DataObject) -> None:
    """On the fused kernel and in plain operators, in one tile and in several, also where queries see no key."""
    causal, masked = data.draw(st.booleans()), data.draw(st.booleans())
    count, heads, kv = data.draw(st.integers(1, 40)), 4, data.draw(st.sampled_from([1, 2, 4]))
    keys = count if causal else data.draw(st.integers(1, 40))
    ids = [torch.tensor(data.draw(st.lists(st.integers(-1, 3), min_size=n, max_size=n)))[None] for n in (count, keys)]
    seen = AttentionMask(causal, *ids) if masked else AttentionMask(causal)
    later = torch.ones(count, keys, dtype=torch.bool).triu(1) if causal else torch.zeros(count, keys, dtype=torch.bool)
    mask = ~later & (ids[0][..., None] == ids[1][:, None] if masked else torch.tensor(True))
    q, k, v, grad = draw((1, heads, count, 8), (1, kv, keys, 8), (1, kv, keys, 8), (1, heads, count, 8))
    size = data.draw(st.sampled_from([7, 512]))
    out, lse, *wanted = defined(q, k, v, grad, mask, 0.5)
    wanted[1:] = [x.unflatten(1, (kv, -1)).sum(2) for x in wanted[1:]]
    with (
        patch.object(module, "tile_rows", lambda *_: size),
        sdpa_kernel(PLAIN) if data.draw(st.booleans()) else nullcontext(),
    ):
        torch.testing.assert_close(attend(q, k, v, seen, 0.5), (out, lse), rtol=1e-10, atol=1e-10)
        got = attend_backward((grad, q, out, lse.nan_to_num(neginf=0.0)), k, v, seen, 0.5)
    torch.testing.assert_close(got, tuple(wanted), rtol=1e-10, atol=1e-10)


@settings(deadline=None)
@given(st.data())
def test_steps_of_the_ring_see_each_pair_of_a_document_once(data: st.DataObject) -> None:
    parts, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    causal, length = data.draw(st.booleans()), 2 * parts * each
    whole = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)))[None]
    places = parallel.zigzag(torch.arange(length), parts, 0).chunk(parts)
    documents = parallel.zigzag(whole, parts).unflatten(1, (parts, -1))
    mesh = fs.virtual_mesh((parts,), ("cp",))
    found = torch.zeros(length, length, dtype=torch.int64)
    for rank, ring in enumerate(mesh.run(lambda: Ring(resolve("cp", mesh), causal, 1.0))):
        with patch.object(Ring, "index", rank):
            for step in range(parts):
                rows, columns, below = part = ring.part(step, 2 * each)
                seen = ring.seen(step, part, documents)
                mine, theirs = places[rank][rows], places[ring.source(step)][columns]
                later = torch.ones(len(mine), len(theirs), dtype=torch.bool).triu(1) if below else None
                mask = visible(seen.queries, seen.keys, later)
                assert mask is not None
                found[mine[:, None], theirs] += mask[0, 0]
    same = whole[0][:, None] == whole[0]
    assert found.tolist() == (same.tril() if causal else same).int().tolist()


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def largest(tokens: int, kernel: AttentionKernel, masked: bool) -> int:
    """The bytes of the largest tensor of forward and backward on a rank of eight, in bfloat16."""
    mesh = fs.virtual_mesh((8,), ("cp",))
    device = "cpu" if kernel is CPU_FLASH else "meta"

    def on_a_rank() -> int:
        if mesh.rank:
            return 0
        each, ring = tokens // mesh.size, Ring(resolve("cp", mesh), True, 0.125)
        with FakeTensorMode(), Largest() as noted:
            heads = (1, 1) if kernel.whole else (8, 2)
            q, k = (torch.empty(1, n, each, 64, dtype=torch.bfloat16, device=device) for n in heads)
            ids = torch.empty(1, mesh.size, each, dtype=torch.int64, device=device) if masked else None
            out, sums = Attention.forward(q, k, k, ids, ring)
            RingGradients.forward(q, q, k, k, out, sums, ids, ring)
        return noted.bytes

    with patch.object(module, "kernel_for", lambda *_: kernel):
        return int(max(mesh.run(on_a_rank)))


LINEAR = [(CPU_FLASH, False), (CPU_FLASH, True), (CUDA_FLASH, False), (EFFICIENT, True)]


@pytest.mark.parametrize(
    ("kernel", "masked"),
    [*LINEAR, pytest.param(SCORES, True, marks=pytest.mark.long)],
    ids=lambda x: getattr(x, "name", x),
)
def test_memory_of_the_ring_is_linear_in_the_tokens(kernel: AttentionKernel, masked: bool) -> None:
    for tokens in (1 << 13, 1 << 15) if kernel.whole else (1 << 15, 1 << 17):
        each = 4 * (1 if kernel.whole else 8) * 64 * tokens // 8  # the gradients of the queries, in float32
        assert largest(tokens, kernel, masked) <= (4 if kernel.whole else 1) * each, tokens


@pytest.mark.parametrize("way", [{"axis": "cp"}, {"axis": "hp", "ring": "cp"}], ids=len)
def test_memory_by_heads_is_linear_in_the_tokens(way: dict[str, str]) -> None:
    """Forward and backward by autograd: a rank holds as many elements as its own part of the sequence has."""
    mesh = fs.virtual_mesh((4, 2), ("cp", "hp"))
    ranks = mesh.size if "ring" in way else 4

    def on_a_rank() -> None:
        for tokens in (1 << 15, 1 << 16, 1 << 17) if mesh.rank == 0 else ():
            with FakeTensorMode(), Largest() as noted:
                shapes = [(1, heads, tokens // ranks, 64) for heads in (8, 2, 2)]
                heads = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
                out = parallel.ulysses_attention(*heads, mesh=mesh, **way)
                torch.autograd.grad(out, heads, torch.empty_like(out))
            assert noted.bytes == 4 * 8 * 64 * tokens // ranks, tokens  # float32 of all queries

    mesh.run(on_a_rank)


@pytest.mark.parametrize("way", ["ring", "heads", "both"])
def test_the_account_of_a_step_is_linear_in_the_tokens(way: str) -> None:
    """The peak of a step with one block of attention, on eight ranks that are played."""
    names, sizes = (("cp", "hp"), (4, 2)) if way == "both" else (("cp",), (8,))

    @fs.unit
    def block(p: Any, x: Tensor) -> Tensor:
        q, k, v = (x @ p["qkv"]).unflatten(-1, (-1, 64)).transpose(1, 2).split((8, 8, 8), 1)
        if way == "ring":
            mixed = parallel.ring_attention(q, k, v)
        else:
            ring = "cp" if way == "both" else None
            mixed = parallel.ulysses_attention(q, k, v, axis=names[-1], ring=ring)
        return x + mixed.transpose(1, 2).flatten(2) @ p["out"]

    def loss(params: Any, x: Tensor) -> Tensor:
        return block(params["block"], x).square().mean()

    def peak(tokens: int) -> int:
        params = {"block": {"qkv": torch.empty(512, 1536, device="meta"), "out": torch.empty(512, 512, device="meta")}}
        mesh = fs.virtual_mesh(sizes, names)
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp(names))], batch=fs.P(None, names), units=("block",))
        step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
        return int(step.trace(torch.empty(1, tokens, 512)).footprint.peak_bytes)

    first, last = peak(1 << 15), peak(1 << 17)
    assert last <= 4 * first, (first, last)
    assert last <= 16 * 4 * 512 * (1 << 17) // 8  # 16 times this rank's hidden states in float32


CUDA = [CUDA_FLASH, EFFICIENT]


@pytest.mark.parametrize("kernel", CUDA, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("masked", [False, True])
def test_kernels_for_cuda_return_what_plain_operators_return(kernel: AttentionKernel, masked: bool) -> None:
    """Their shapes and dtypes, by PyTorch's own rules for tensors without data."""
    if masked and not kernel.masks:
        return
    with FakeTensorMode():
        q, k = (torch.empty(2, heads, 40, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
        bias = torch.empty(2, 1, 40, 40, dtype=torch.bfloat16, device="meta") if masked else None
        out, lse = kernel.forward(q, k, k, bias, not masked, 0.5)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
        grads = kernel.backward((q, q, k, k, out, lse), bias, not masked, 0.5)
        assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", CUDA, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("count", [40, 128])
def test_kernels_for_cuda_equal_plain_operators(kernel: AttentionKernel, masked: bool, count: int) -> None:
    if masked and not kernel.masks:
        return
    near = {"rtol": 0.03, "atol": 0.03}
    given = draw((2, 4, count, 64), (2, 2, count, 64), (2, 2, count, 64), (2, 4, count, 64))
    q, k, v, grad = (x.to("cuda", torch.bfloat16) for x in given)
    bias = torch.zeros(2, 1, count, count, device="cuda", dtype=torch.bfloat16)
    bias = bias.masked_fill_(torch.rand(count, count, device="cuda") < 0.3, -torch.inf) if masked else None
    out, lse = kernel.forward(q, k, v, bias, not masked, 0.125)
    torch.testing.assert_close((out, lse), SCORES.forward(q, k, v, bias, not masked, 0.125), **near)
    shifted = lse + 1  # of more keys than these
    got = kernel.backward((grad, q, k, v, out, shifted), bias, not masked, 0.125)
    want = SCORES.backward((grad, q, k, v, out, shifted), bias, not masked, 0.125)
    torch.testing.assert_close([x.float() for x in got], [x.float() for x in want], **near)


def test_the_switches_of_pytorch_choose_the_kernel() -> None:
    q, k, v = draw((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8))
    assert kernel_for(q, k, v, True, False) == CPU_FLASH
    with sdpa_kernel(PLAIN):
        assert kernel_for(q, k, v, True, False) == SCORES
    with FakeTensorMode():
        assert kernel_for(*[torch.empty(1, 2, 4, 8, device="meta")] * 3, True, False) == CPU_FLASH
