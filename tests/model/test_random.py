"""``fs.random``: draws that depend on key and position alone, under every transform, and keys used twice."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard.errors import KeyReuseError, PlanError
from fshard.model.philox import philox, uniform
from tests.model.test_philox import VECTORS, signed

R = fs.random
K = R.key(0x1234_5678_9ABC_DEF0)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers_from_keys_that_are_tensors(counter: Any, key: Any, expected: Any) -> None:
    low = torch.tensor([signed(counter[0] | counter[1] << 32)])
    words = philox((torch.tensor(key[0]), torch.tensor(key[1])), low, counter[2] | counter[3] << 32)
    assert tuple(int(word) for word in words) == expected


def test_a_draw_is_the_words_of_philox_in_their_order() -> None:
    expected = uniform(0x1234_5678_9ABC_DEF0, torch.arange(10))
    assert torch.equal(R.uniform(K, (10,), torch.float64), expected)
    assert torch.equal(R.uniform(K, (2, 5), torch.float64).flatten(), expected)
    for dtype, bits in ((torch.float32, 24), (torch.bfloat16, 8), (torch.float16, 11)):
        drawn = R.uniform(K, (10,), dtype)
        assert drawn.dtype == dtype and torch.equal(drawn.double(), (expected * 2**bits).floor() / 2**bits)
    assert torch.equal(R.bernoulli(K, 0.3, (10,)), expected < 0.3)
    assert torch.equal(R.bernoulli(K, expected), torch.zeros(10, dtype=torch.bool))


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    whole = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in whole)
    shape = tuple(draw(st.integers(0, size - first)) for size, first in zip(whole, start, strict=True))
    return whole, start, shape


@given(parts(), st.booleans())
def test_a_part_is_drawn_as_it_is_in_the_whole(case: Any, tensors: bool) -> None:
    whole, start, shape = case
    box = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
    given_start = tuple(map(torch.tensor, start)) if tensors else start
    for draw in (R.uniform, R.normal):
        assert torch.equal(draw(K, shape, start=given_start, of=whole), draw(K, whole)[box])
    rows = (shape[0], *whole[1:])
    first = torch.tensor(start[0]) if tensors else start[0]
    assert torch.equal(R.normal(K, rows, start=first), R.normal(K, whole)[box[0]])


def test_large_draws_and_far_starts() -> None:
    whole = R.normal(K, (300_001,))
    assert torch.equal(R.normal(K, (20,), start=131_063), whole[131_063:131_083])
    far = (1 << 50) + 3
    assert torch.equal(R.uniform(K, (9,), start=far)[2:], R.uniform(K, (7,), start=far + 2))


def test_distributions() -> None:
    u, z = R.uniform(K, (1 << 18,)), R.normal(K, (1 << 18,))
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 3e-3 and abs(z.std() - 1) < 8e-3
    kept = R.dropout(K, torch.ones(1 << 18), 0.25)
    assert set(kept.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))} and abs(kept.mean() - 1) < 5e-3
    keys = [R.split(K)[0], R.split(K)[1], R.fold_in(K, 0), R.fold_in(K, 1), R.fold_in(K, -1), K, R.split(K, 3)[2]]
    draws = torch.stack([R.normal(key, (1 << 14,)) for key in keys])
    assert (torch.corrcoef(draws) - torch.eye(len(keys))).abs().max() < 0.04


def test_keys() -> None:
    assert R.key(-1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF] and torch.equal(R.key(torch.tensor(-1)), R.key(-1))
    assert torch.equal(R.split(K, 5)[:2], R.split(K)) and R.split(K, 5).unique(dim=0).shape == (5, 2)
    assert torch.equal(R.fold_in(K, torch.tensor(7)), R.fold_in(K, 7)) and torch.equal(
        R.fold_in(K, 2**64 - 1), R.fold_in(K, -1)
    )
    # Frozen: numbers must not change between versions.
    assert R.split(R.key(5)).tolist() == [[1664195124, 1407176791], [1140096880, 4031796577]]
    assert R.fold_in(R.key(5), 3).tolist() == [4049657007, 3585352087]


def noisy(key: Tensor, x: Tensor) -> Tensor:
    first, second = R.split(key)
    return (R.dropout(first, x.sin(), 0.3) * R.normal(second, x.shape, x.dtype)).square().sum()


def test_under_every_transform() -> None:
    x, keys = torch.randn(3, 4, dtype=torch.float64), R.split(K, 3)
    alone = torch.stack([noisy(key, row) for key, row in zip(keys, x, strict=True)])
    assert torch.allclose(torch.vmap(noisy)(keys, x), alone)
    grads = torch.vmap(torch.func.grad(noisy, 1))(keys, x)
    leaf = x.clone().requires_grad_()
    sum(noisy(key, row) for key, row in zip(keys, leaf, strict=True)).backward()  # type: ignore[union-attr]
    assert torch.allclose(grads, leaf.grad)
    tangent = torch.randn_like(x)
    _, slope = torch.func.jvp(lambda x: torch.vmap(noisy)(keys, x).sum(), (x,), (tangent,))
    assert torch.allclose(slope, (grads * tangent).sum())
    starts = torch.vmap(lambda at: R.normal(K, (2,), start=at))(torch.arange(5))
    assert torch.equal(starts, R.normal(K, (6,)).unfold(0, 2, 1))
    numbers = torch.vmap(R.fold_in, (None, 0))(K, torch.arange(4))
    assert torch.equal(numbers[3], R.fold_in(K, 3))


@pytest.mark.long
def test_under_compile() -> None:
    x = torch.randn(3, 4)

    def all_of_it(key: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grads = torch.vmap(torch.func.grad(noisy, 1))(R.split(R.fold_in(key, at), 3), x)
        return grads, R.uniform(key, (4,), start=at)

    compiled = torch.compile(all_of_it, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(K, torch.tensor(3), x), all_of_it(K, torch.tensor(3), x), strict=True):
        assert torch.allclose(got, expected)


def test_a_key_used_twice_is_noticed() -> None:
    with R.checked():
        R.uniform(K, (4,))
        R.uniform(K, (4,), start=4)  # another slice of the same draw
        R.split(K), R.fold_in(K, 1)
        with pytest.raises(KeyReuseError, match=r"test_random.py:\d+, and for one of shape \[2\] at test_random"):
            R.normal(K, (2,), start=7)
        with pytest.raises(KeyReuseError, match="split"):
            R.dropout(K, torch.ones(3))
    with R.checked():
        R.uniform(K, (2, 2), start=(0, 0), of=(4, 4))
        R.uniform(K, (2, 2), start=(0, 2), of=(4, 4))  # between the rows of the first
        with pytest.raises(KeyReuseError):
            R.uniform(K, (2, 1), start=(1, 1), of=(4, 4))
        R.uniform(K, (2,), start=8)  # behind the last row of the others, as numbers of another whole
        with pytest.raises(KeyReuseError):
            R.uniform(K, (2,), start=7)
    R.normal(K, (2,)), R.normal(K, (2,))  # outside of the scope nobody counts


def test_keys_under_vmap_are_counted_one_by_one() -> None:
    x = torch.randn(3, 4)
    with R.checked():
        torch.vmap(torch.func.grad(noisy, 1))(R.split(K, 3), x)
        with pytest.raises(KeyReuseError):
            noisy(R.split(K, 3)[1], x[1])
        with pytest.raises(KeyReuseError):
            torch.vmap(lambda key: R.uniform(key, (2,)))(R.key(9).expand(3, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: R.uniform(torch.zeros(2), (3,)), r"int64 tensor of shape \[2\], this is torch.float32"),
        (lambda: R.uniform(R.split(K), (3,)), "torch.vmap"),
        (lambda: R.split(7), "this is int"),
        (lambda: R.uniform(K, (3,), torch.int64), "float32"),
        (lambda: R.dropout(K, torch.ones(2), 1.5), r"p=1.5"),
        (lambda: R.uniform(K, (3,), start=2, of=(4,)), "does not lie in"),
        (lambda: R.uniform(K, (3,), start=-1), "does not lie in"),
        (lambda: R.uniform(K, (3, 2), start=(0, 1)), "does not lie in"),
        (lambda: R.uniform(K, (3, 2), start=(0,)), "one index a dim"),
        (lambda: R.uniform(K, (3, 2), of=(3,)), "does not lie in"),
        (lambda: R.uniform(K, (), start=2), "does not lie in"),
    ],
)
def test_what_cannot_be_drawn(call: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        call()


def test_dropout_of_everything_and_nothing() -> None:
    x = torch.tensor([math.inf, 1.0])
    assert torch.equal(R.dropout(K, x, 1.0), torch.zeros(2)) and torch.equal(R.dropout(K, x, 0.0), x)
