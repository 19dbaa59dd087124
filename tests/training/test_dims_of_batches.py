"""Batches that ranks share along other dims than the first: nothing takes a part of a sample for a sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import BatchError, PlanError

LATE = fs.P(None, "data")
"""Recurrent nets take (time, samples, features)."""

FEW = ("step", "value_and_grad")
"""What takes ``accumulate=``."""


def made(mesh: fs.Mesh, spec: fs.P) -> tuple[fs.Model, fs.Plan]:
    torch.manual_seed(0)
    model = fs.split(nn.GRU(3, 4).double())
    return model, fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=spec)


def ways(model: fs.Model, plan: fs.Plan, weighted: bool, accumulate: int = 1) -> dict[str, Callable[[Any], Any]]:
    """What takes a mean over a batch: the loss by each."""
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)

    def loss(params: Any, batch: Any) -> Any:
        squares = model.apply(params, batch)[0].square()
        return fs.Mean(squares.sum(), squares.numel()) if weighted else squares.mean()

    step = fs.make_train_step(loss, opt, plan, accumulate=accumulate, donate=False)
    grads = fs.value_and_grad(loss, plan, accumulate=accumulate)
    return {
        "step": lambda x: step(state, x)[1].loss,
        "value_and_grad": lambda x: grads(state.params, x)[0],
        "eval": lambda x: fs.make_eval_step(loss, plan)(state, x),
        "sharded_loss": lambda x: fs.func.sharded_loss(loss, plan)(state.params, x),
    }


def on_ranks(world: int, function: Callable[[fs.Mesh], Any], names: tuple[str, ...] = ("data",)) -> list[Any]:
    """What a function returns on each rank of a mesh, whose last axis has two ranks if there are two."""
    sizes = (world,) if len(names) == 1 else (world // 2, 2)

    def job() -> Any:
        with fs.make_mesh(sizes, names) as mesh:
            return function(mesh)

    return fs.virtual_mesh((world,), ("any",)).run(job)


def tried(call: Callable[[], Any]) -> str:
    try:
        return f"{float(call()):.9f}"
    except BatchError as error:
        return str(error)


@pytest.mark.sample(2)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_parts_along_a_later_dim(world: int, weighted: bool) -> None:
    x = torch.randn(5, 2 * world - 1, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def job(mesh: fs.Mesh) -> dict[str, str]:
        model, plan = made(mesh, LATE)
        mine = x.tensor_split(world, 1)[mesh.rank]
        return {name: tried(lambda way=way: way(mine)) for name, way in ways(model, plan, weighted).items()}

    torch.manual_seed(0)
    right = f"{nn.GRU(3, 4).double()(x)[0].square().mean().item():.9f}"
    for found in on_ranks(world, job):
        for name, text in found.items():
            if weighted:
                assert text == right, name
            else:
                assert f"rank {world - 1}: 1 along dim 1" in text and "fs.Mean" in text, (name, text)


def test_sequences_of_other_lengths_are_no_uneven_parts() -> None:
    """Only ranks that share a sample must have parts of it that are equal."""

    def job(lengths: tuple[int, ...]) -> Callable[[fs.Mesh], str]:
        def on_rank(mesh: fs.Mesh) -> str:
            model, plan = made(mesh, fs.P("data", "cp"))
            return tried(lambda: ways(model, plan, False)["step"](torch.ones(2, lengths[mesh.rank], 3).double()))

        return on_rank

    assert all(float(text) > 0 for text in on_ranks(4, job((4, 4, 6, 6)), ("data", "cp")))
    assert all("rank 1: 3 along dim 1" in text for text in on_ranks(4, job((4, 3, 6, 6)), ("data", "cp")))


@pytest.mark.parametrize("world", [1, 2])
def test_microbatches_are_not_cut_across_samples(world: int) -> None:
    x = torch.randn(6, 4 * world, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def job(mesh: fs.Mesh) -> list[str]:
        model, plan = made(mesh, LATE)
        every, mine = ways(model, plan, False, accumulate=2), plan.local_batch(x)
        parts = fs.Microbatches(mine.tensor_split(2, 1))
        return [tried(lambda name=name, x=x: every[name](x)) for name in FEW for x in (mine, parts)]

    torch.manual_seed(0)
    right = f"{nn.GRU(3, 4).double()(x)[0].square().mean().item():.9f}"
    for first, given, second, again in on_ranks(world, job):
        assert given == again == right
        for text in (first, second):
            assert "accumulate=2 cuts batches along dim 0" in text and "fs.Microbatches" in text


@pytest.mark.parametrize("spec", [LATE, fs.P("cp", "data")])
def test_samples_of_which_ranks_have_parts_are_not_clipped(spec: fs.P) -> None:
    mesh = fs.abstract_mesh((2, 2), ("data", "cp"))
    _, plan = made(mesh, spec)
    loss: Any = lambda params, x: x.mean()  # noqa: E731
    for call in (lambda: fs.func.clipped_grad(loss, plan, 1.0), lambda: fs.func.per_sample_grad(loss, plan)):
        with pytest.raises(PlanError, match=r"cuts other dims.*along dim 0 alone"):
            call()


def test_an_axis_of_one_rank_cuts_nothing() -> None:
    _, plan = made(fs.abstract_mesh((2, 1), ("data", "cp")), fs.P("data", "cp"))
    assert callable(fs.func.clipped_grad(lambda params, x: x.mean(), plan, 1.0))


def converted(mesh: fs.Mesh) -> list[list[str]]:
    """On a rank: what each way says where the rows of ranks are no tensors, and unequally many: the loss makes them."""
    plan = fs.make_plan({"w": torch.ones(3)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params={"w": torch.ones(3)})

    def loss(params: Any, x: Any) -> Any:
        return (torch.as_tensor(x) @ params["w"]).mean()

    def said(x: Any) -> list[str]:
        calls = (fs.make_train_step(loss, opt, plan, donate=False), fs.make_eval_step(loss, plan))
        return [tried(lambda call=call: call(state, x)) for call in calls] + [  # type: ignore[misc]
            tried(lambda: fs.value_and_grad(loss, plan)(state, x)[0]),
            tried(lambda: fs.func.sharded_loss(loss, plan)(state.params, x)),
        ]

    x = torch.full((2 + mesh.rank, 3), 1.0 + mesh.rank)
    return [said(x.numpy()), said(x.tolist())]


def test_rows_that_are_no_tensors_count() -> None:
    for of_arrays, of_lists in on_ranks(2, converted):
        for said in of_arrays:
            assert "rank 0: 2 rows\n  rank 1: 3 rows" in said, said
        for said in of_lists:
            assert "rank 0: 6 values\n  rank 1: 9 values" in said, said
