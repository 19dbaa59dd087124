"""Tensors that stand for parts of named ones: what code makes of them is what it makes of the tensors."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fshard.interchange.source import MemorySource
from fshard.interchange.woven import Woven

Op = Callable[[list[Any], random.Random], Any]


def _pick(pool: list[Any], draw: random.Random) -> Any:
    return draw.choice(pool)


def _alike(pool: list[Any], draw: random.Random) -> list[Any]:
    one = _pick(pool, draw)
    return [x for x in pool if x.shape == one.shape][:3]


def _dim(x: Any, draw: random.Random) -> int:
    return draw.randrange(-x.ndim, x.ndim)


OPS: dict[str, Op] = {
    "stack": lambda pool, draw: torch.stack(_alike(pool, draw), draw.randrange(2)),
    "cat": lambda pool, draw: torch.cat(rows := _alike(pool, draw), _dim(rows[0], draw)),
    "transpose": lambda pool, draw: (x := _pick(pool, draw)).transpose(_dim(x, draw), _dim(x, draw)).contiguous(),
    "chunk": lambda pool, draw: torch.chunk(x := _pick(pool, draw), 2, _dim(x, draw))[-1].contiguous(),
    "unbind": lambda pool, draw: x if (x := _pick(pool, draw)).ndim < 2 else x.unbind(_dim(x, draw))[0],
    "split": lambda pool, draw: torch.split(x := _pick(pool, draw), [x.shape[0] - 1, 1] if len(x) > 1 else [1])[0],
    "slice": lambda pool, draw: _pick(pool, draw)[1:],
    "squeeze": lambda pool, draw: _pick(pool, draw).unsqueeze(draw.randrange(2)).squeeze(0),
    "reshape": lambda pool, draw: _pick(pool, draw).reshape(-1),
    "scale": lambda pool, draw: _pick(pool, draw) * 2,
}
"""The last two are computed of whole tensors."""


@pytest.mark.parametrize("seed", range(40))
def test_programs_on_woven_tensors(seed: int) -> None:
    held = {name: torch.randn(shape) for name, shape in {"a": (4, 6), "b": (4, 6), "c": (3, 4, 2), "d": (6,)}.items()}
    source = MemorySource("held", held)

    def program(pool: list[Any]) -> list[Any]:
        draw, names = random.Random(seed), []
        for _ in range(12):
            name = draw.choice(list(OPS))
            made = OPS[name](pool, draw)
            if 0 < made.numel() < 500 and made.ndim:
                pool.append(made)
                names.append(name)
        return pool

    expected: list[Tensor] = program(list(held.values()))
    for made, right in zip(program([Woven.of(n, x.shape, x.dtype) for n, x in held.items()]), expected, strict=True):
        assert made.shape == right.shape and torch.equal(made.whole(source.read), right)
        low = tuple(n // 2 for n in made.shape)
        part = torch.zeros([n - a for n, a in zip(made.shape, low, strict=True)])
        made.fill(low, part, source.read)
        assert torch.equal(part, right[tuple(slice(a, None) for a in low)])


def test_what_writes_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="writes to its arguments"):
        Woven.of("a", (2,), torch.float32).add_(1)
