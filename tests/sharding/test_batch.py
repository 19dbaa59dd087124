"""A rank's part of a global batch."""

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.errors import TreeError


def plans(sizes: tuple[int, ...], names: tuple[str, ...], batch: P) -> list[fs.Plan]:
    """A plan as each rank of a mesh sees it."""
    meshes = [fs.abstract_mesh(sizes, names, rank=rank) for rank in range(torch.Size(sizes).numel())]
    return [fs.make_plan({"w": torch.zeros(8)}, mesh, [("w", P())], batch=batch) for mesh in meshes]


def test_ranks_along_other_axes_have_the_same_rows() -> None:
    mine = [(p.data_rank, p.data_size, p.local_batch(torch.arange(6))) for p in plans((2, 3), ("tp", "dp"), P("dp"))]
    assert [(rank, size) for rank, size, _ in mine] == [(0, 3), (1, 3), (2, 3)] * 2
    assert [part.tolist() for _, _, part in mine] == [[0, 1], [2, 3], [4, 5]] * 2


def test_several_axes_cut_one_dim_in_the_order_of_the_spec() -> None:
    for names in (("a", "b"), ("b", "a")):
        made = plans((2, 2), ("a", "b"), P(names))
        parts = [p.local_batch(torch.arange(4)).item() for p in made]
        assert parts == [p.data_rank for p in made] == [p.mesh.index(names) for p in made]


def test_each_dim_is_cut_by_its_own_axes() -> None:
    whole = {"x": torch.arange(16).view(4, 4), "label": torch.arange(4), "scale": torch.tensor(2.0), "name": "n"}
    for plan in plans((2, 2), ("dp", "cp"), P("dp", "cp")):
        row, column = plan.mesh.coords()
        part = plan.local_batch(whole)
        assert torch.equal(part["x"], whole["x"].unflatten(0, (2, 2)).unflatten(2, (2, 2))[row, :, column])
        assert part["label"].tolist() == [[0, 1], [2, 3]][row]  # it has no dim that cp could cut
        assert part["scale"] == 2.0 and part["name"] == "n"


def test_the_first_dim_may_be_whole() -> None:
    first, second = plans((2,), ("cp",), P(None, "cp"))
    whole = torch.arange(6).view(1, 6)
    assert torch.equal(torch.cat([first.local_batch(whole), second.local_batch(whole)], 1), whole)


def test_parts_are_views_and_what_has_no_rows_stays() -> None:
    plan = plans((2,), ("shard",), P("shard"))[1]
    whole, kept = torch.arange(4), fs.Whole(torch.arange(3))
    part = plan.local_batch((whole, kept))
    assert part[0].data_ptr() == whole[2:].data_ptr() and part[1] is kept


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"x": torch.zeros(7, 2), "y": torch.zeros(3)}, ["batch['x']: shape [7, 2]: dim 0", "batch['y']: shape [3]"]),
        ([torch.zeros(4, 2).numpy()], ["batch[0]: a ndarray, no tensor: give torch.as_tensor"]),
        ({"x": torch.eye(4).to_sparse()}, ["batch['x']: a tensor of torch.sparse_coo", "make it dense"]),
        (
            [torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged)],
            ["batch[0]: a nested tensor", "pad it"],
        ),
        ({"n": 3}, ["batch is a dict without a tensor that has rows"]),
        (torch.tensor(1.0), ["batch is a Tensor without a tensor that has rows"]),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_on_every_rank(batch: object, words: list[str]) -> None:
    for plan in plans((2,), ("shard",), P("shard")):
        with pytest.raises(TreeError) as caught:
            plan.local_batch(batch)
        assert all(word in str(caught.value) for word in words), caught.value
