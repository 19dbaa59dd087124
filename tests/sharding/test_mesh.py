"""Mesh arithmetic, against a definition that lists every rank."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fshard as fs
from fshard.errors import PlanError
from fshard.sharding.mesh import resolve_sizes

NAMES = ("a", "b", "c", "d")


@st.composite
def meshes(draw: Any) -> fs.Mesh:
    """A mesh of up to four axes, as seen from any of its ranks."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    rank = draw(st.integers(0, math.prod(sizes) - 1))
    return fs.abstract_mesh(sizes, NAMES[: len(sizes)], rank=rank)


@st.composite
def meshes_and_axes(draw: Any) -> tuple[fs.Mesh, tuple[str, ...]]:
    """A mesh, and some of its axes in any order."""
    mesh = draw(meshes())
    order = draw(st.permutations(mesh.axis_names))
    return mesh, tuple(order[: draw(st.integers(0, len(order)))])


def every_place(mesh: fs.Mesh) -> list[dict[str, int]]:
    """Where each rank lies: row-major, the last axis fastest."""
    rows = itertools.product(*map(range, mesh.sizes))
    return [dict(zip(mesh.axis_names, row, strict=True)) for row in rows]


@given(meshes())
def test_coordinates(mesh: fs.Mesh) -> None:
    places = every_place(mesh)
    assert mesh.size == len(places) == math.prod(mesh.shape.values())
    assert [mesh.coords(rank) for rank in range(mesh.size)] == [tuple(place.values()) for place in places]
    assert mesh.coords() == mesh.coords(mesh.rank)


@given(meshes_and_axes())
def test_index_counts_along_axes_in_the_order_given(case: tuple[fs.Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    for rank, place in enumerate(every_place(mesh)):
        ordered = list(itertools.product(*(range(mesh.shape[axis]) for axis in axes)))
        assert mesh.index(axes, rank) == ordered.index(tuple(place[axis] for axis in axes))
    assert mesh.index(axes) == mesh.index(axes, mesh.rank)
    assert mesh.axis_size(axes) == len(ordered)


@given(meshes_and_axes())
def test_ranks_and_partition(case: tuple[fs.Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    places = every_place(mesh)
    for rank, mine in enumerate(places):
        peers = [r for r, at in enumerate(places) if all(at[a] == mine[a] for a in mesh.axis_names if a not in axes)]
        ranks = mesh.ranks(axes, rank)
        assert sorted(ranks) == peers
        assert [mesh.index(axes, r) for r in ranks] == list(range(len(ranks)))
    assert mesh.ranks(axes) == mesh.ranks(axes, mesh.rank)
    cells = mesh.partition(axes)
    assert sorted(itertools.chain(*cells)) == list(range(mesh.size))
    assert {frozenset(cell) for cell in cells} == {frozenset(mesh.ranks(axes, r)) for r in range(mesh.size)}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_one_size_may_be_left_open(sizes: list[int], data: Any) -> None:
    names, world = NAMES[: len(sizes)], math.prod(sizes)
    assert resolve_sizes(sizes, names, world) == resolve_sizes(sizes, names, None) == tuple(sizes)
    at = data.draw(st.integers(0, len(sizes) - 1))
    given_ = [*sizes[:at], -1, *sizes[at + 1 :]]
    assert resolve_sizes(given_, names, world) == tuple(sizes)
    rest = world // sizes[at]
    if rest > 1:
        with pytest.raises(PlanError, match=f"not a multiple of {rest}.*{names[at]!r}"):
            resolve_sizes(given_, names, world + 1)


@pytest.mark.parametrize(
    ("sizes", "names", "world", "says"),
    [
        ((2, 2), ("a",), None, "one distinct name an axis"),
        ((), (), None, "one distinct name an axis"),
        ((2, 2), ("a", "a"), None, "one distinct name an axis"),
        ((0,), ("a",), None, "positive int"),
        ((-2,), ("a",), None, "positive int"),
        ((2.0,), ("a",), None, "positive int"),
        ((True,), ("a",), None, "positive int"),
        ((-1,), ("a",), None, "no world to divide"),
        ((-1, -1), ("a", "b"), 4, "only one axis can be left open"),
        ((2, 3), ("a", "b"), 4, "--nproc-per-node 6"),
    ],
)
def test_sizes_that_cannot_be(sizes: Any, names: Any, world: int | None, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        resolve_sizes(sizes, names, world)


def test_a_mesh_is_a_value() -> None:
    mesh = fs.abstract_mesh((2, 3), ("x", "y"), rank=4)
    assert mesh == fs.abstract_mesh([2, 3], ["x", "y"], rank=4)
    assert mesh != fs.abstract_mesh((2, 3), ("x", "y"), rank=3)
    assert len({mesh, fs.abstract_mesh((2, 3), ("x", "y"), rank=4)}) == 1


def test_without_torchrun_a_mesh_has_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with fs.make_mesh((-1, 1), ("x", "y")) as mesh:
        assert (mesh.sizes, mesh.rank, mesh.coords()) == ((1, 1), 0, (0, 0))
