"""Philox: the published vectors, and the independence of a value from everything but key and index."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fshard.model import philox as module
from fshard.model.philox import block, fold, integers, normal, philox, runs, to_normal, uniform

ONES = (1 << 64) - 1


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


# Random123's known answers for philox4x32-10: counter words, key words, results.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    low = torch.tensor([signed(counter[0] | counter[1] << 32)])
    words = philox(key[0] | key[1] << 32, low, counter[2] | counter[3] << 32)
    assert tuple(int(word) for word in words) == expected


def reference(key: int, counter: int) -> tuple[int, ...]:
    """Philox4x32-10 in Python integers, which do not wrap."""
    c = [counter & 0xFFFFFFFF, counter >> 32, 0, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p, q = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(q >> 32) ^ c[1] ^ k[0], q & 0xFFFFFFFF, (p >> 32) ^ c[3] ^ k[1], p & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


@given(key=st.integers(0, ONES), counter=st.integers(0, (1 << 62) - 1))
@settings(deadline=None, max_examples=50)
def test_it_is_philox_everywhere(key: int, counter: int) -> None:
    index = torch.tensor([counter >> 2 << 2]) + torch.arange(4)
    expected = reference(key, counter >> 2)
    assert tuple(int(word) for word in philox(key, torch.tensor([counter >> 2]))) == tuple(
        int(word) for word in torch.cat(philox(key, index[:1] >> 2))
    )
    assert tuple(int(u * 2**32) for u in uniform(key, index)) == expected


@pytest.mark.parametrize("draw", [uniform, normal])
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_a_slice_of_the_draw_is_the_draw_of_the_slice(draw: object, data: st.DataObject) -> None:
    assert callable(draw)
    size, key = 3001, data.draw(st.integers(0, ONES))
    whole: Tensor = draw(key, torch.arange(size))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    parts = [draw(key, torch.arange(a, b)) for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    some = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), max_size=50)), dtype=torch.int64)
    assert torch.equal(draw(key, some), whole[some])


def test_blocks_of_counters_do_not_show() -> None:
    whole = normal(1, torch.arange(300_000))
    assert torch.equal(normal(1, torch.arange(131_065, 131_090)), whole[131_065:131_090])
    assert torch.equal(normal(1, torch.arange(0, 300_000, 7)), whole[::7])


@pytest.mark.parametrize("size", [2, 1 << 20])
@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_runs_are_the_draw_at_their_positions(size: int, data: st.DataObject) -> None:
    """In blocks of any size, in bits."""
    length, key = data.draw(st.integers(0, 30)), data.draw(st.integers(0, ONES))
    begin = torch.tensor(data.draw(st.lists(st.integers(0, 500), max_size=9)), dtype=torch.int64)
    index = begin.unsqueeze(1) + torch.arange(length)
    with patch.object(module, "block", lambda device: size):
        words, drawn = runs(key, begin, length, integers), runs(key, begin, length, to_normal)
    assert torch.equal(words.double() * 2.0**-32, uniform(key, index.reshape(-1)).view(words.shape))
    assert torch.equal(drawn, normal(key, index.reshape(-1)).view(drawn.shape))


@pytest.mark.parametrize("size", [7, 100, 1 << 20])
def test_bits_do_not_depend_on_the_size_of_blocks(size: int) -> None:
    want = normal(1, torch.arange(100_000)), normal(1, torch.arange(0, 100_000, 7))
    with patch.object(module, "block", lambda device: size * 10):
        assert torch.equal(normal(1, torch.arange(100_000)), want[0])
        assert torch.equal(normal(1, torch.arange(0, 100_000, 7)), want[1])


def test_blocks_are_larger_on_a_device_and_bounded_everywhere() -> None:
    cpu, gpu = (block(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert cpu < gpu and block(torch.device("cuda:1")) == gpu
    largest = []

    class Sizes(TorchDispatchMode):
        """Notes the size of every tensor that an operator makes."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            largest.append(out.numel() if isinstance(out, Tensor) and "cat" not in str(func) else 0)
            return out

    with patch.object(module, "block", lambda device: 50), Sizes():
        runs(1, torch.arange(0, 900, 3), 2, integers)
        runs(1, torch.arange(3, 5), 900, integers)
    assert max(largest) <= 4 * 2 * 50


def test_large_indices() -> None:
    far = torch.arange(5) + (1 << 60) + 1
    assert torch.equal(uniform(3, far)[2:], uniform(3, far[2:])) and uniform(3, far).unique().numel() == 5


def test_distributions() -> None:
    index = torch.arange(1 << 18)
    u, z = uniform(11, index), normal(11, index)
    assert u.dtype == z.dtype == torch.float64 and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 3e-3 and abs(u.std() - math.sqrt(1 / 12)) < 3e-3
    assert abs(z.mean()) < 8e-3 and abs(z.std() - 1) < 8e-3
    assert abs((z**4).mean() - 3) < 0.1 and abs((z[:-1] * z[1:]).mean()) < 8e-3
    cells = torch.histc(0.5 * (1 + torch.erf(z / math.sqrt(2))), 64, 0, 1)
    assert ((cells - 4096).abs() < 6 * 64).all()


def test_keys() -> None:
    # Frozen: initial values must not change between versions.
    assert fold(0, "head.weight") == 0x60E5D86F64F8F185
    keys = {fold(seed, path) for seed in (0, 1, -1, 1 << 70) for path in ("a", "b", "a.b", "1:a", "")}
    assert len(keys) == 20 and all(0 <= key <= ONES for key in keys)
    assert not torch.equal(uniform(fold(0, "a"), torch.arange(8)), uniform(fold(0, "b"), torch.arange(8)))


def test_an_empty_draw() -> None:
    assert normal(0, torch.arange(0)).shape == (0,)
