"""The functions of fshard.parallel one by one, on ranks played in one process: values and gradients against PyTorch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, parallel
from fshard import collectives as c
from fshard.collectives.scope import resolve
from fshard.parallel.attention import Ring
from tests.shared.workers import Pools

DOUBLE = torch.float64


def mapped(fn: Any, n: int, axis: str, in_specs: Any, out_specs: Any) -> Any:
    """A function of slices as one of global tensors."""
    return fs.shard_map(fn, fs.virtual_mesh((n,), (axis,)), in_specs, out_specs)


def alike(mine: Any, plain: Any, *args: Tensor) -> None:
    """Two functions of global tensors have the same values and gradients."""
    got, want = torch.func.vjp(mine, *args), torch.func.vjp(plain, *args)
    torch.testing.assert_close(got[0], want[0])
    weights = torch.randn(want[0].shape, dtype=DOUBLE)
    for a, b in zip(got[1](weights), want[1](weights), strict=True):
        torch.testing.assert_close(a, b)


def draw(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Normal numbers."""
    gen = torch.Generator().manual_seed(len(shapes))
    return [torch.randn(shape, dtype=DOUBLE, generator=gen) for shape in shapes]


@pytest.mark.parametrize("dim", [None, 1])
def test_two_linear_layers(dim: int | None) -> None:
    def mine(x: Tensor, w: Tensor, b: Tensor, v: Tensor, a: Tensor) -> Tensor:
        middle = parallel.column_linear(x, w, b, sequence_dim=dim).tanh()
        return parallel.row_linear(middle, v, a, sequence_dim=dim)

    cut = P(None, "tp") if dim else P()
    sharded = mapped(mine, 4, "tp", (cut, P("tp"), P("tp"), P(None, "tp"), P()), cut)
    alike(
        sharded,
        lambda x, w, b, v, a: F.linear(F.linear(x, w, b).tanh(), v, a),
        *draw((2, 8, 6), (12, 6), (12,), (5, 12), (5,)),
    )


def test_norms_on_slices_of_the_sequence() -> None:
    def mine(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = parallel.split_sequence(x)
        y = parallel.layer_norm(parallel.rms_norm(y, w), w, b)
        return parallel.join_sequence(y)

    def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(F.rms_norm(x, w.shape, w), w.shape, w, b)

    args = draw((2, 8, 6), (6,), (6,))
    alike(mapped(mine, 4, "tp", (P(), P(), P()), P()), plain, *args)

    # Where types are kept, as over an axis of a step that is no data axis, the gradient is the sum only by ``shared``.
    mesh = fs.virtual_mesh((4,), ("tp",))

    def on_a_rank() -> tuple[Tensor, ...]:
        with c.use_mesh(mesh):
            return torch.func.grad(lambda *a: mine(*a).pow(3).sum(), (0, 1, 2))(*args)

    for grads in mesh.run(on_a_rank):
        want = torch.func.grad(lambda *a: plain(*a).pow(3).sum(), (0, 1, 2))(*args)
        torch.testing.assert_close(grads, want)


@pytest.mark.parametrize("dim", [None, 1])
def test_embedding_of_a_vocabulary_in_parts(dim: int | None) -> None:
    tokens = torch.arange(24).view(2, 12) * 7 % 20
    out = P(None, "tp") if dim else P()
    mine = mapped(lambda w: parallel.vocab_embedding(tokens, w, sequence_dim=dim), 4, "tp", (P("tp"),), out)
    alike(mine, lambda w: F.embedding(tokens, w), *draw((20, 3)))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_a_vocabulary_in_parts(reduction: str) -> None:
    target = torch.arange(10).view(2, 5) * 3 % 17
    target[1, 2] = -100
    whole = draw((2, 5, 20))[0] * 30  # large enough that exp overflows without the maximum
    options = {"vocab": 17, "reduction": reduction}

    def mine(x: Tensor) -> Tensor:
        return parallel.vocab_cross_entropy(x, target, **options)

    def plain(x: Tensor) -> Tensor:
        return F.cross_entropy(x[..., :17].flatten(0, 1), target.flatten(), reduction=reduction).view(
            target.shape if reduction == "none" else ()
        )

    alike(mapped(mine, 4, "tp", (P(None, None, "tp"),), P()), plain, 4 * whole)


def test_cross_entropy_sends_no_logits() -> None:
    mesh = fs.virtual_mesh((2,), ("tp",))
    sent = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sent.extend([out.numel()] if isinstance(out, Tensor) else [])
            return out

    with mesh, c.use_mesh(fs.make_mesh((1,), ("tp",))), Watch():
        parallel.vocab_cross_entropy(torch.randn(4, 50), torch.arange(4))
    assert max(sent) == 200


def brute(x: Tensor, routing: parallel.Routing, weight: Tensor, room: int | None) -> Tensor:
    """A mixture of experts by loops; ``room`` places in each expert for each group."""
    out = torch.zeros(*x.shape[:-1], weight.shape[1], dtype=x.dtype)
    for group in range(x.shape[0]):
        taken = [0] * routing.experts
        for choice in range(routing.chosen.shape[-1]):
            for token in range(x.shape[1]):
                expert = int(routing.chosen[group, token, choice])
                taken[expert] += 1
                if room is None or taken[expert] <= room:
                    share = routing.weights[group, token, choice]
                    out[group, token] = out[group, token] + share * (weight[expert] @ x[group, token])
    return out


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    tokens=st.integers(1, 7),
    k=st.integers(1, 4),
    capacity=st.sampled_from([None, 0.3, 1.0, 2.0]),
    skew=st.sampled_from([0.0, 50.0]),
)
def test_mixture_of_experts(ranks: int, groups: int, tokens: int, k: int, capacity: float | None, skew: float) -> None:
    x, logits, weight = draw((ranks * groups, tokens, 3), (ranks * groups, tokens, 4), (4, 2, 3))
    logits[..., 1] += skew  # all first choices are then of one expert, and other ranks get nothing of them

    def mine(x: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
        routing = parallel.route(logits, k)
        linear = lambda rows, counts: parallel.grouped_linear(rows, weight, counts)  # noqa: E731
        return parallel.moe(x, routing, linear, capacity=capacity)

    room = None if capacity is None else -(-int(capacity * tokens * k * 1000) // 4000)

    def plain(x: Tensor, logits: Tensor, weight: Tensor) -> Tensor:
        return brute(x, parallel.route(logits, k), weight, room)

    alike(mapped(mine, ranks, "ep", (P("ep"), P("ep"), P("ep")), P("ep")), plain, x, logits, weight)


def test_experts_without_an_axis_need_no_mesh() -> None:
    x, logits, weight = draw((5, 3), (5, 4), (4, 2, 3))
    for capacity in (None, 8.0):
        routing = parallel.route(logits, 2)
        linear = lambda rows, counts: parallel.grouped_linear(rows, weight, counts, axis=None)  # noqa: E731
        got = parallel.moe(x, routing, linear, axis=None, capacity=capacity)
        torch.testing.assert_close(got, brute(x[None], parallel.route(logits[None], 2), weight, None)[0])


def test_losses_of_a_router() -> None:
    even = torch.eye(4, dtype=DOUBLE).repeat(3, 1) * 9
    assert parallel.load_balance_loss(parallel.route(even, 1)).item() == pytest.approx(1)
    crowded = torch.zeros(12, 4, dtype=DOUBLE).index_fill(1, torch.tensor([2]), 99)
    assert parallel.load_balance_loss(parallel.route(crowded, 1)).item() == pytest.approx(4)
    (logits,) = draw((8, 4))
    torch.testing.assert_close(parallel.z_loss(logits), logits.logsumexp(-1).pow(2).mean())
    mine = mapped(lambda x: parallel.load_balance_loss(parallel.route(x), axis="data"), 4, "data", (P("data"),), P())
    alike(mine, lambda x: parallel.load_balance_loss(parallel.route(x)), logits)


def test_weights_of_a_token_add_up() -> None:
    (logits,) = draw((6, 5))
    assert torch.allclose(parallel.route(logits, 3).weights.sum(-1), torch.ones(6, dtype=DOUBLE))
    torch.testing.assert_close(parallel.route(logits, 1, normalize=False).weights, logits.softmax(-1).amax(-1)[:, None])


@pytest.mark.parametrize(("ranks", "heads", "kv"), [(1, 2, 2), (2, 4, 2), (4, 2, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_ring_attention(ranks: int, heads: int, kv: int, causal: bool) -> None:
    q, k, v = draw((2, heads, 16, 4), (2, kv, 16, 4), (2, kv, 16, 4))
    cut = P(None, None, "cp")
    ring = mapped(lambda *a: parallel.ring_attention(*a, causal=causal, scale=0.7), ranks, "cp", (cut,) * 3, cut)

    def mine(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        turned = [parallel.zigzag(x, ranks, 2) for x in (q, k, v)]
        return parallel.unzigzag(ring(*turned), ranks, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.7, enable_gqa=True)

    y, back = torch.func.vjp(mine, q, k, v)
    want, plain_back = torch.func.vjp(plain, q, k, v)
    torch.testing.assert_close(y, want)
    weights = torch.randn_like(y)
    for a, b in zip(back(weights), plain_back(weights), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [True, False])
def test_ring_attention_of_tensors_that_lie_otherwise(causal: bool) -> None:
    """The fused kernels read rows, and take the layout of the last dim for granted."""
    ring = lambda *a: parallel.ring_attention(*a, causal=causal, mesh=fs.make_mesh((1,), ("cp",)))  # noqa: E731
    given = [x.mT.contiguous().mT.requires_grad_() for x in draw(*[(2, 2, 8, 16)] * 3)]
    weights = torch.randn(2, 2, 16, 8, dtype=DOUBLE).mT
    want = F.scaled_dot_product_attention(*given, is_causal=causal)
    torch.testing.assert_close(got := ring(*given), want)
    grads = [torch.autograd.grad(y, given, weights) for y in (got, want)]
    torch.testing.assert_close(*grads)


def ring_on_a_rank(dtype: torch.dtype) -> list[float]:
    """On a rank: how far its part of ring attention is from PyTorch's attention."""
    q, k, v, weights = (x.to(dtype) for x in draw((2, 2, 16, 8), (2, 1, 16, 8), (2, 1, 16, 8), (2, 2, 16, 8)))
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    want = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(want, whole, weights.float())
    with fs.make_mesh((-1,), ("cp",)) as mesh, c.use_mesh(mesh):
        mine = [parallel.zigzag_slice(x, 2).requires_grad_() for x in (q, k, v)]
        y = parallel.ring_attention(*mine)
        got = torch.autograd.grad(y, mine, parallel.zigzag_slice(weights, 2))
        pairs = zip((y, *got), (want, *grads), strict=True)
        return [(a.float() - parallel.zigzag_slice(b, 2)).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ring_attention_on_real_ranks(pool: Pools, world: int) -> None:
    assert all(far < 1e-5 for rank in pool(world).run(ring_on_a_rank, torch.float32) for far in rank)
    assert all(far < 0.06 for rank in pool(world).run(ring_on_a_rank, torch.bfloat16) for far in rank)


@given(parts=st.integers(1, 5), each=st.integers(1, 3))
def test_zigzag_shares_the_work(parts: int, each: int) -> None:
    length = 2 * parts * each
    x = torch.arange(length)
    slices = parallel.zigzag(x, parts, 0).chunk(parts)
    assert parallel.unzigzag(torch.cat(slices), parts, 0).tolist() == x.tolist()
    assert len({int((part + 1).sum()) for part in slices}) == 1  # keys that each rank's queries attend to
    mesh = fs.virtual_mesh((parts,), ("cp",))
    assert mesh.run(lambda: parallel.zigzag_positions(2 * each, mesh=mesh).tolist()) == [s.tolist() for s in slices]


@given(parts=st.integers(1, 6), each=st.integers(1, 3))
def test_steps_of_the_ring_are_equal_work_and_together_the_causal_mask(parts: int, each: int) -> None:
    mesh = fs.virtual_mesh((parts,), ("cp",))

    def on_a_rank() -> tuple[list[int], list[tuple[slice, slice, bool]]]:
        ring = Ring(resolve("cp", mesh), True, 1.0)
        return parallel.zigzag_positions(2 * each, mesh=mesh).tolist(), [ring.part(i, 2 * each) for i in range(parts)]

    ranks = mesh.run(on_a_rank)
    held = [places for places, _ in ranks]
    seen, work = [], []
    for rank, (places, steps) in enumerate(ranks):
        work.append([])
        for step, (rows, columns, causal) in enumerate(steps):
            keys = held[(rank - step) % parts][columns]
            pairs = [(q, k) for i, q in enumerate(places[rows]) for j, k in enumerate(keys) if not causal or j <= i]
            work[-1].append(len(pairs))
            seen += pairs
    assert sorted(seen) == [(q, k) for q in range(2 * each * parts) for k in range(q + 1)]
    assert all(done == work[0] for done in work)


def test_ring_attention_keeps_its_own_part_alone() -> None:
    kept: list[int] = []

    def on_a_rank() -> None:
        with c.use_mesh(mesh):
            q, k, v = (x.requires_grad_() for x in draw((1, 1, 8, 4), (1, 1, 8, 4), (1, 1, 8, 4)))
            with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
                parallel.ring_attention(q, k, v)

    mesh = fs.virtual_mesh((4,), ("cp",))
    mesh.run(on_a_rank)
    assert sorted(kept) == [8] * 4 + [32] * 16  # q, k, v, the output and its sums, on each of four ranks
