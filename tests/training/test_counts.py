"""Counts of means that are negative, and batches that are iterators: refused on all ranks, and the state goes on."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import BatchError, LossError, PeerError


def refused(where: str) -> list[str]:
    """On a rank: what a step of a negative count on the last rank says, and whether the next step runs."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        params, opt, signs = {"w": torch.ones(4)}, fs.optim.sgd(0.1), [1.0]
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))

        def loss(p: Any, x: Tensor) -> Any:
            count = signs[-1] * len(x)
            mean = fs.Mean((p["w"] * x).sum(), count if where == "number" else torch.tensor(count))
            # A whole step's count is positive: one microbatch alone is wrong.
            large = fs.Mean(mean.total, torch.where(x.mean() > 2, 100.0, mean.count))
            good = fs.Mean(mean.total, len(x))
            return {"aux": (good, {"aux": mean}), "microbatch": large}.get(where, mean)

        state = fs.init_state(plan, opt, params=params)
        step = fs.make_train_step(loss, opt, plan, accumulate=2)
        x, said = torch.cat([torch.ones(2, 4), 3 * torch.ones(2, 4)]), []
        for sign in (-1.0 if mesh.rank == mesh.size - 1 else 1.0, 1.0):
            signs.append(sign)
            try:
                state, metrics = step(state, x)
                said.append(f"step {state.step}: {metrics.loss.item() > 0}")
            except (LossError, PeerError) as error:
                said.append(str(error))
        return said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["tensor", "aux", "microbatch"])
def test_negative_counts_of_one_rank_are_refused_on_all(ranks: int, where: str) -> None:
    found = fs.virtual_mesh((ranks,), ("any",)).run(refused, where)
    assert all(each == found[0] for each in found)
    first, second = found[0]
    assert first.startswith("the count of an fs.Mean is negative") and f"rank {ranks - 1}: below zero" in first
    assert second == "step 1: True"


def test_a_negative_number_is_refused_where_it_is_returned() -> None:
    first, last = fs.virtual_mesh((2,), ("any",)).run(refused, "number")
    assert "fs.Mean has a count of -2.0: count elements" in last[0] and "rank 1" in first[0]
    assert first[1] == last[1] == "step 1: True"


def test_iterators_are_no_batches_on_any_rank() -> None:
    def on_rank() -> list[str]:
        said = []
        with fs.make_mesh((-1,), ("data",)) as mesh:
            plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
            opt = fs.optim.sgd(0.1)
            state = fs.init_state(plan, opt, params={"w": torch.ones(4)})

            def loss(p: Any, batch: Any) -> Any:
                return (p["w"] * batch["x"]).mean()

            batch = {"x": (row for row in torch.ones(2, 4)) if mesh.rank else torch.ones(2, 4)}
            calls = [
                lambda: fs.make_train_step(loss, opt, plan)(state, batch),
                lambda: fs.value_and_grad(loss, plan)(state.params, batch),
                lambda: fs.func.sharded_loss(loss, plan)(state.params, batch),
                lambda: fs.func.hvp(loss, plan)(state.params, state.params, batch),
                lambda: fs.func.per_sample_grad(loss, plan)(state.params, batch),
                lambda: fs.func.clipped_grad(loss, plan, 1.0)(state.params, batch),
            ]
            for call in calls:
                try:
                    call()
                except (BatchError, PeerError) as error:
                    said.append(str(error))
        return said

    first, second = fs.virtual_mesh((2,), ("any",)).run(on_rank)
    assert len(first) == len(second) == 6
    assert all("batch['x'] is a generator" in text and "next(batches)" in text for text in second)


def test_a_tensor_is_no_rate() -> None:
    with pytest.raises(fs.errors.PlanError, match=r"lr = tensor\(0.1000\): is a tensor.*float\(lr\)"):
        fs.optim.sgd(torch.tensor(0.1))  # type: ignore[arg-type]
