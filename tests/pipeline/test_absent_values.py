"""Values without data: results are found where the first microbatch left them, and made anew where calls differ."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fshard.pipeline.absent_values import AbsentResults


def results() -> AbsentResults:
    return AbsentResults(FakeTensorMode(allow_non_fake_inputs=True))


def microbatch(held: AbsentResults, code: Callable[[], Any]) -> Any:
    held.begin()
    return code()


def shuffled(x: Tensor, real: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Methods, functions, operators, slices, a write in place and a value with data."""
    y = torch.cat([x.transpose(0, 1), torch.nn.functional.gelu(x).T * 2.0 + real.T], 1)
    y[:, 0] = real.sum()
    first, second = y.chunk(2, dim=1)
    return first[:width].contiguous(), second.reshape(-1)


def test_the_second_microbatch_finds_all_results() -> None:
    held = results()
    x = held.empty((4, 6), torch.float32, torch.device("cpu"))
    first = microbatch(held, lambda: shuffled(x, torch.randn(4, 6), 3))
    count = len(held.entries)
    second = microbatch(held, lambda: shuffled(x, torch.randn(4, 6), 3))
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True]
    assert len(held.entries) == count == held.at
    real = shuffled(torch.randn(4, 6), torch.randn(4, 6), 3)
    assert [(y.shape, y.stride(), y.dtype) for y in first] == [(y.shape, y.stride(), y.dtype) for y in real]


@pytest.mark.parametrize("rows, width", [(4, 2), (1, 3)], ids=["a plain value", "the shape of a value with data"])
def test_what_differs_is_computed(rows: int, width: int) -> None:
    held = results()
    x = held.empty((4, 6), torch.float32, torch.device("cpu"))
    microbatch(held, lambda: shuffled(x, torch.randn(4, 6), 3))
    other = microbatch(held, lambda: shuffled(x, torch.randn(rows, 6), width))
    real = shuffled(torch.randn(4, 6), torch.randn(rows, 6), width)
    assert [y.shape for y in other] == [y.shape for y in real]
    again = microbatch(held, lambda: shuffled(x, torch.randn(rows, 6), width))
    assert again[0] is other[0]


def test_lists_are_the_callers_own() -> None:
    held = results()
    x = held.like(torch.empty(4, 2))
    found = [microbatch(held, lambda: x.tensor_split(2)) for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == 2
    grids = [microbatch(held, lambda: held.of(list, ([x, x],), {})) for _ in range(2)]
    grids[0].clear()
    assert len(grids[1]) == len(microbatch(held, lambda: held.of(list, ([x, x],), {}))) == 2


def test_shapes_are_read_as_they_were_at_that_point() -> None:
    """A write that changes a shape happens once; each microbatch reads the shape before and after it."""
    held = results()
    x = held.empty((4, 6), torch.float32, torch.device("cpu"))

    def code() -> list[torch.Size]:
        y = x + 1
        before = y.shape
        y.unsqueeze_(0)
        return [before, y.shape]

    assert microbatch(held, code) == microbatch(held, code) == [(4, 6), (1, 4, 6)]
