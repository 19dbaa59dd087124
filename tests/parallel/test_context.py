"""Attention over a sequence that is cut over ranks, by a ring, by heads and by both, equals that of one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from fshard import P, parallel
from fshard import collectives as c
from tests.parallel.test_functions import draw
from tests.shared.workers import Pools

TIME = 24
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 10 + [2] * 2 + [-1] * 7, [0] * 24])


@dataclass(frozen=True)
class Way:
    """A way to cut attention: the mesh, the function of a rank, and the number of heads."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    axis: str | None = None
    ring: str | None = None
    heads: int = 4
    kv: int = 2
    values: int = 4  # their width

    def __str__(self) -> str:
        cut = "+".join(f"{name}{size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"{'ring' if self.axis is None else 'heads'}-{cut}-{self.heads}-{self.kv}-{self.values}"

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that cut the sequence, the ring's first."""
        return ("cp",) if self.axis is None else tuple(name for name in (self.ring, self.axis) if name)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """On a rank."""
        if self.axis is None:
            return parallel.ring_attention(q, k, v, **options)
        return parallel.ulysses_attention(q, k, v, axis=self.axis, ring=self.ring, **options)

    def whole(self, causal: bool, documents: Tensor | None) -> Callable[..., Tensor]:
        """As a function of whole tensors."""
        ranks = 1
        for size in self.sizes:
            ranks *= size
        cut = P(None, None, self.over)

        def on_a_rank(q: Tensor, k: Tensor, v: Tensor, d: Tensor) -> Tensor:
            return self.attend(q, k, v, causal=causal, documents=None if documents is None else d)

        mesh = fs.virtual_mesh(self.sizes, self.names)
        parts = fs.shard_map(on_a_rank, mesh, (cut, cut, cut, P(None, self.over)), cut)

        def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            turned = [parallel.zigzag(x, ranks, 2) for x in (q, k, v)]
            ids = DOCUMENTS if documents is None else documents
            return parallel.unzigzag(parts(*turned, parallel.zigzag(ids, ranks)), ranks, 2)

        return together


WAYS = [
    Way((4,), ("cp",)),
    Way((2,), ("cp",), "cp"),
    Way((4,), ("cp",), "cp"),  # fewer kv heads than ranks
    Way((3,), ("cp",), "cp", heads=6),  # kv heads that the ranks do not divide
    Way((2, 2), ("cp", "hp"), "hp", "cp"),
    Way((2, 2), ("hp", "cp"), "hp", "cp", heads=2, kv=1),  # the ring's axis is the inner one of the mesh
    Way((3, 2), ("cp", "hp"), "hp", "cp"),
    Way((2,), ("cp",), values=2),
    Way((2,), ("cp",), "cp", values=6),
]


def drawn(way: Way, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries, keys, values, and weights of the result."""
    heads = [(way.heads, 4), (way.kv, 4), (way.kv, way.values), (way.heads, way.values)]
    shapes = [(2, count, TIME, width) for count, width in heads]
    return [x.to(dtype) for x in draw(*shapes)]


def plain(causal: bool, documents: Tensor | None) -> Callable[..., Tensor]:
    """PyTorch's attention under a mask."""
    ids = torch.zeros_like(DOCUMENTS) if documents is None else documents
    mask = (ids[..., None] == ids[:, None]).unsqueeze(1)
    mask = mask.tril() if causal else mask

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

    return attention


def equal(got: Any, want: Any, dtype: torch.dtype = torch.float64) -> None:
    """Up to 1e-10 in float64, 1e-5 in float32."""
    near = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, want, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("causal", "packed"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_attention_and_its_gradients(way: Way, causal: bool, packed: bool, dtype: torch.dtype) -> None:
    documents = DOCUMENTS if packed else None
    *heads, weights = drawn(way, dtype)
    y, back = torch.func.vjp(way.whole(causal, documents), *heads)
    want, plain_back = torch.func.vjp(plain(causal, documents), *heads)
    equal(y, want, dtype)
    equal(back(weights), plain_back(weights), dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[4], WAYS[7]], ids=str)
def test_second_derivatives(way: Way, packed: bool) -> None:
    """In both orders of differentiation, and forward derivatives."""
    documents = DOCUMENTS if packed else None
    *heads, weights = drawn(way)
    along = tuple(x.cos() for x in heads)

    def derivatives(fn: Callable[..., Tensor]) -> list[Any]:
        def loss(*heads: Tensor) -> Tensor:
            return (fn(*heads).sin() * weights).sum()

        grad = torch.func.grad(loss, argnums=(0, 1, 2))

        def product(*heads: Tensor) -> Tensor:
            return sum(((g * x).sum() for g, x in zip(grad(*heads), along, strict=True)), torch.tensor(0.0))

        forward = torch.func.jvp(grad, tuple(heads), along)
        return [torch.func.jvp(fn, tuple(heads), along), forward, torch.func.grad(product, argnums=(0, 1, 2))(*heads)]

    for got, want in zip(derivatives(way.whole(True, documents)), derivatives(plain(True, documents)), strict=True):
        equal(got, want)


def test_second_derivatives_by_autograd() -> None:
    """On one rank, whose functions are the same."""
    *heads, weights = (x.requires_grad_() for x in drawn(WAYS[0]))
    results = []
    for fn in (lambda *x: WAYS[0].attend(*x, mesh=fs.make_mesh((1,), ("cp",))), plain(True, None)):
        grads = torch.autograd.grad((fn(*heads).sin() * weights).sum(), heads, create_graph=True)
        results.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), [*heads, weights]))
    equal(*results)


def test_autocast_does_not_round_scores() -> None:
    """In plain operators, of the first derivatives and of the second."""

    def derivatives() -> list[Tensor]:
        *heads, weights = (x.requires_grad_() for x in drawn(WAYS[0], torch.float32))
        y = WAYS[0].attend(*heads, mesh=fs.make_mesh((1,), ("cp",)))
        first = torch.autograd.grad(y, heads, weights, create_graph=True)
        return [y, *first, *torch.autograd.grad(first, heads, [x.detach() for x in heads])]

    want = derivatives()
    with sdpa_kernel(SDPBackend.MATH), torch.autocast("cpu", torch.bfloat16):
        equal(derivatives(), want, torch.float32)


def on_processes(way: Way) -> list[Tensor]:
    """On a rank: its result and gradients, less those of one process."""
    with fs.make_mesh(way.sizes, way.names) as mesh, c.use_mesh(mesh):
        *heads, weights = drawn(way)
        parts = [parallel.zigzag_slice(x, 2, axis=way.over) for x in (*heads, weights)]
        mine = [x.requires_grad_() for x in parts[:3]]
        y = way.attend(*mine, documents=parallel.zigzag_slice(DOCUMENTS, axis=way.over))
        got = (y, *torch.autograd.grad(y, mine, parts[3]))
        want, back = torch.func.vjp(plain(True, DOCUMENTS), *heads)
        expected = (want, *back(weights))
        return [a - parallel.zigzag_slice(b, 2, axis=way.over) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize("way", [WAYS[1], Way((2,), ("cp",))], ids=str)
def test_processes_compute_the_same(pool: Pools, way: Way) -> None:
    for rank in pool(2).run(on_processes, way):
        equal(rank, [torch.zeros_like(x) for x in rank])


def test_positions_follow_the_cut() -> None:
    """Over one axis and over two, the tokens of a rank are where its positions say."""
    mesh = fs.virtual_mesh((3, 2), ("cp", "hp"))
    for axis in ("cp", "hp", ("cp", "hp"), ("hp", "cp")):

        def both(axis: Any = axis) -> tuple[list[int], list[int]]:
            part = parallel.zigzag_slice(torch.arange(TIME), 0, axis=axis, mesh=mesh)
            return part.tolist(), parallel.zigzag_positions(len(part), axis=axis, mesh=mesh).tolist()

        assert all(part == places for part, places in mesh.run(both))


BAD = {
    "heads that the axis does not divide": (
        lambda q: parallel.ulysses_attention(q[:, :3], q[:, :3], q[:, :3]),
        ("3 heads in ulysses_attention over the 2 ranks of axis 'cp'", "Choose 4 heads"),
    ),
    "tokens": (
        lambda q: parallel.ulysses_attention(*[q[:, :, :3]] * 3),
        ("ulysses_attention: 3 tokens a rank on 2 ranks of axis 'cp'", "multiple of 4; pad it to 8"),
    ),
    "documents": (
        lambda q: parallel.ulysses_attention(q, q, q, documents=torch.zeros(2, 7).long()),
        ("ulysses_attention: documents [2, 7] of 2 rows of 24 tokens on this rank must be [2, 24]",),
    ),
    "documents of floats": (
        lambda q: parallel.ring_attention(q, q, q, documents=torch.zeros(2, 24)),
        ("ring_attention: documents are torch.float32", "give int64"),
    ),
    "no tensor": (lambda q: parallel.ring_attention(q, q, q, documents=[0]), ("documents", "a list")),
    "one axis twice": (lambda q: parallel.ulysses_attention(q, q, q, ring="cp"), ("none twice",)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_on_all_ranks_before_anything_is_sent(name: str) -> None:
    call, says = BAD[name]
    mesh = fs.virtual_mesh((2,), ("cp",))

    def on_a_rank() -> str:
        with c.use_mesh(mesh), pytest.raises((fs.errors.PlanError, fs.errors.AxisError)) as caught:
            call(torch.ones(2, 4, TIME, 4))
        return str(caught.value)

    ranks = mesh.run(on_a_rank)
    assert ranks[0] == ranks[1]
    assert not [part for part in says if part not in ranks[0]], ranks[0]
