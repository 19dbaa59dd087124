"""One rule for plain values that functions return, in train steps, evaluations and step functions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.errors import BatchError, LossError
from tests.shared.workers import Pools

FACES = ("train", "microbatches", "eval", "grad", "step", "aux in a step", "evaluation in a step", "apart")
OPT = fs.optim.sgd(0.1)
ROWS = torch.arange(16.0, dtype=torch.float64).view(8, 2).sin()


def floats(x: Tensor) -> dict[str, Any]:
    """Values of rows: floats that differ between ranks, or not, and others that are equal."""
    return {
        "python": float(x.sum()) if not isinstance(x, torch._subclasses.FakeTensor) else 0.0,
        "tensor": x.mean(),
        "short": x.float().mean(),
        "numpy": np.float64(0.7),
        "equal": 0.1,
        "equal tensor": torch.tensor(0.1, dtype=torch.float64),
        "nan": math.nan,
        "exact": fs.Mean(x.sum(), x.numel()),
        "whole": 3,
        "whole tensor": torch.tensor(5),
        "flag": True,
        "text": "hi",
        "none": None,
    }


def made(face: str, plan: fs.Plan, values: Any, donate: bool = True) -> Any:
    """A function of a state and a batch that gives the state and the values, by one of the faces."""

    def loss(p: Any, x: Tensor) -> Any:
        return (x @ p["w"]).square().mean(), values(x)

    if face in ("train", "microbatches"):
        step = fs.make_train_step(loss, OPT, plan, accumulate=2 if face == "microbatches" else 1, donate=donate)

        def call(state: Any, x: Tensor) -> Any:
            state, metrics = step(state, x)
            return state, metrics.aux

        return call
    evaluate = fs.make_eval_step(lambda p, x: values(x), plan)
    if face == "eval":
        return lambda state, x: (state, evaluate(state, x))
    grad, update = fs.value_and_grad(loss, plan, has_aux=True), fs.make_update(OPT, plan)

    def fn(state: Any, x: Tensor) -> Any:
        (value, aux), grads = grad(state, x)
        found = {"step": values, "aux in a step": lambda _: aux, "evaluation in a step": lambda x: evaluate(state, x)}
        if face == "apart" and value.item() < 0:  # asks for a value, so that parts run one by one
            raise AssertionError
        told = found.get(face, values)(x)
        state, _ = update(state, grads)
        return state, told

    if face == "grad":
        return lambda state, x: (state, grad(state, x)[0][1])
    return fs.make_step(fn, plan, donate=donate)


def case(face: str, world: int, values: Any, x: Tensor = ROWS) -> tuple[list[Any], list[Tensor]]:
    """The results of two calls on each rank, or the error, and the parameters after that."""
    mesh = fs.virtual_mesh((world,), ("data",))

    def run() -> Any:
        plan = fs.make_plan(
            {"w": torch.ones(2, dtype=torch.float64)}, fs.make_mesh((-1,), ("data",)), [(".*", fs.fsdp("data"))]
        )
        state = fs.init_state(plan, OPT, params={"w": torch.ones(2, dtype=torch.float64)})
        call = made(face, plan, values)
        rows = x.chunk(world)[mesh.rank] if isinstance(x, Tensor) else x[mesh.rank]
        found: Any = None
        try:
            for _ in range(2):
                state, found = call(state, rows)
        except Exception as error:
            found = error
        return found, fs.unshard(fs.settle(state).params, plan)["w"]

    results = mesh.run(run)
    return [found for found, _ in results], [params for _, params in results]


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("face", FACES)
def test_floats_are_means_over_ranks(face: str, world: int) -> None:
    found, _ = case(face, world, floats)
    parts = [floats(part) for part in ROWS.chunk(world * (2 if face == "microbatches" else 1))]
    many = face == "microbatches"
    for rank in found:
        assert not isinstance(rank, Exception), rank
        if face not in ("aux in a step", "evaluation in a step", "grad", "train", "microbatches", "eval"):
            assert type(rank["python"]) is float
        assert rank["python"] == pytest.approx(sum(p["python"] for p in parts) / len(parts))
        assert rank["tensor"].item() == pytest.approx(float(ROWS.mean())) and rank["tensor"].dtype == torch.float64
        assert rank["short"].dtype == torch.float32 and rank["exact"].item() == pytest.approx(float(ROWS.mean()))
        assert rank["equal"] == 0.1 and rank["numpy"] == 0.7 and math.isnan(rank["nan"])
        assert rank["equal tensor"] == torch.tensor(0.1, dtype=torch.float64)
        assert rank["flag"] == ([True, True] if many else True) and rank["none"] == ([None, None] if many else None)
        assert rank["whole"] == ([3, 3] if many else 3) and rank["whole tensor"].tolist() == ([5, 5] if many else 5)


UNEQUAL: dict[str, Any] = {
    "int": lambda x, rank: rank + 3,
    "tensor": lambda x, rank: torch.tensor(7) + rank,
    "flag": lambda x, rank: rank == 1,
    "text": lambda x, rank: f"of {rank}",
    "none": lambda x, rank: None if rank else "rank 0 alone",
    "kind": lambda x, rank: 0 if rank else 0.5,
}


@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("face", ["train", "eval", "step", "apart"])
def test_others_that_differ_are_refused_before_the_update(face: str) -> None:
    for kind, value in UNEQUAL.items():
        mesh = fs.virtual_mesh((2,), ("data",))

        def run(value: Any = value, mesh: Any = mesh) -> Any:
            plan = fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", fs.fsdp("data"))])
            state = fs.init_state(plan, OPT, params={"w": torch.ones(2)})
            call = made(face, plan.here if hasattr(plan, "here") else plan, lambda x: {"n": value(x, mesh.rank)})
            with pytest.raises(LossError, match=r"(?s)\['n'\].*rank 0: .*rank 1: .*fs\.Mean"):
                call(state, ROWS.float().chunk(2)[mesh.rank])
            return fs.unshard(state.params, plan)["w"]

        for params in mesh.run(run):
            assert torch.equal(params, torch.ones(2)), kind


@pytest.mark.parametrize("face", ["train", "step"])
def test_floats_of_batches_of_different_sizes_are_refused_if_they_differ(face: str) -> None:
    mesh = fs.virtual_mesh((2,), ("data",))

    def run(weighted: bool) -> Any:
        plan = fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", fs.fsdp("data"))])
        state = fs.init_state(plan, OPT, params={"w": torch.ones(2)})
        x = ROWS.float()[: 3 + 2 * mesh.rank]

        def loss(p: Any, x: Tensor) -> Any:
            return fs.Mean((x @ p["w"]).sum(), x.shape[0]), told(x) if face == "train" else {}

        def told(x: Tensor) -> dict[str, Any]:
            return {"m": fs.Mean(x.sum(), x.numel()) if weighted else x.mean(), "rate": 0.1}

        if face == "train":
            state, metrics = fs.make_train_step(loss, OPT, plan)(state, x)
            return metrics.aux
        grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)

        def fn(state: Any, x: Tensor) -> Any:
            _, grads = grad(state, x)
            return update(state, grads)[0], {"rate": 0.1} | ({} if weighted else told(x))

        return fs.make_step(fn, plan)(state, x)[1]

    assert all(found["rate"] == 0.1 for found in mesh.run(run, True))
    with pytest.raises(BatchError, match=r"(?s)\['m'\].*fs\.Mean\(total, count\)"):
        mesh.run(run, False)


def test_buffers_are_each_ranks_own() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("largest", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.largest = torch.maximum(self.largest, x.max())
            return x * self.scale

    model, mesh = fs.split(Counts()), fs.virtual_mesh((2,), ("data",))

    def run() -> Any:
        plan = fs.make_plan(model, mesh, [(".*", fs.P())])

        def loss(p: Any, b: Any) -> Any:
            out, buffers = model.apply(p, b, buffers=model.buffers)
            return out.mean(), {"buffers": buffers}

        state = fs.init_state(plan, OPT, params=model.params)
        x = torch.tensor([1.0, 2.0]) + mesh.rank
        _, metrics = fs.make_train_step(loss, OPT, plan, donate=False)(state, x)
        return metrics.aux["buffers"]["largest"].item()

    assert mesh.run(run) == [2.0, 3.0]


def many(x: Tensor) -> dict[str, Any]:
    """More floats than a row holds."""
    return {str(n): x.mean() * n for n in range(40)}


def test_more_floats_than_a_row_holds() -> None:
    for face in ("train", "step"):
        found, _ = case(face, 2, many)
        for rank in found:
            assert [float(rank[str(n)]) for n in range(40)] == pytest.approx(
                [float(ROWS.mean()) * n for n in range(40)]
            )


def on_processes() -> list[tuple[str, Any]]:
    """On a rank: a float of each face, and the refusal of an int that differs."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        plan = fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", fs.fsdp("data"))])
        x, out = ROWS.float().chunk(mesh.size)[mesh.rank], []
        for face in ("train", "eval", "step"):
            state = fs.init_state(plan, OPT, params={"w": torch.ones(2)})
            state, found = made(face, plan, lambda x: {"m": x.mean(), "n": 4})(state, x)
            out.append((face, (round(float(found["m"]), 5), found["n"])))
            try:
                made(face, plan, lambda x: {"n": mesh.rank})(state, x)
            except LossError as error:
                out.append((face, "n" in str(error)))
        return out


@pytest.mark.processes
def test_on_processes(pool: Pools) -> None:
    want = round(float(ROWS.mean()), 5)
    for rank in pool(2).run(on_processes):
        assert rank == [x for face in ("train", "eval", "step") for x in ((face, (want, 4)), (face, True))]
