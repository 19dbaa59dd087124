"""Leaves of a global batch that may be no rows are told of where the batch is cut."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs

ROWS = fs.P("data")


def cut(batch: Any, sizes: tuple[int, ...] = (2,), names: tuple[str, ...] = ("data",), spec: fs.P = ROWS) -> Any:
    """The part of a batch that rank 0 gets."""
    mesh = fs.abstract_mesh(sizes, names)
    return fs.make_plan({"w": torch.zeros(4)}, mesh, [("w", fs.P())], batch=spec).local_batch(batch)


def rows(*shape: int) -> Tensor:
    """A tensor of this shape."""
    return torch.zeros(shape)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"x": rows(8, 3), "y": rows(8), "weights": rows(4)}, r"8 in most .*2 parts by .*batch\['weights'\] \[4\]"),
        ({"x": rows(8, 3), "mask": rows(2, 2)}, r"batch\['mask'\] \[2, 2\], batch\['x'\] \[8, 3\]"),
        ((rows(6, 3), [rows(6), rows(2)], rows(6)), r"6 in most .*: batch\[1\]\[1\] \[2\]\. .*fs\.Whole\(value\)"),
    ],
)
def test_leaves_of_other_sizes_are_told_of(batch: Any, says: str) -> None:
    with pytest.warns(UserWarning, match=says):
        cut(batch)


def test_along_every_dim_that_is_cut() -> None:
    two = {"sizes": (2, 2), "names": ("data", "seq"), "spec": fs.P("data", "seq")}
    with pytest.warns(UserWarning, match=r"along dim 1.*batch\['scale'\] \[4, 2\]"):
        cut({"x": rows(4, 8), "y": rows(4, 8), "scale": rows(4, 2)}, **two)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": rows(8, 3), "y": rows(8), "n": rows(), "k": 3},
        {"x": rows(8, 3), "weights": fs.Whole(rows(4))},
        {"x": rows(8, 3), "y": rows(8, 5, 2)},
    ],
)
def test_nothing_is_told_of_rows(batch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut(batch)
        cut({"x": rows(8), "w": rows(4)}, sizes=(1,))  # nothing is cut
