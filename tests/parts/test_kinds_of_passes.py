"""What ranks sum of a pass must be of one kind on all of them, in steps of parts as in train steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import LossError, PeerError, ReplicationError
from fshard.runtime.engine.mean import Mean

NEGATIVE = "the count of an fs.Mean is negative"


def loss_of(differs: str, last: bool) -> Any:
    """A loss function that is wrong on the last rank."""

    def loss(params: Any, x: Tensor) -> Any:
        total = (params["w"] * x).sum() + params["b"].sum()
        count, mean = torch.tensor(-3.0 if last else 8.0), total.detach()
        returned: dict[str, Any] = {
            "count": Mean(total, count),
            "count of a mean": (total, {"a": Mean(mean, count)}),
            "loss": Mean(total, torch.tensor(2.0)) if last else total,
            "means": (total, {"a": mean, "b": mean} if last else {"a": mean}),
            "names": (total, {"a" if last else "b": mean}),
        }
        return returned.get(differs, total)

    return loss


def made(differs: str, reads: bool) -> tuple[str, bool]:
    """On a rank: what a step says, and whether its state is as it was and can be used."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        last, params = mesh.rank == mesh.size - 1, {"w": torch.ones(4), "b": torch.ones(2)}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))])
        opt, aux = fs.optim.sgd(0.1), differs in ("count of a mean", "means", "names")
        grad = fs.value_and_grad(loss_of(differs, last), plan, has_aux=aux)
        well, update = fs.value_and_grad(loss_of("", last), plan), fs.make_update(opt, plan)

        def fn(state: Any, x: Tensor) -> Any:
            value, grads = grad(state, x)
            told = Mean(torch.tensor(1.0), torch.tensor(-3.0 if last else 2.0))
            if reads:
                grads, value = tree.map(torch.neg, grads), tree.map(torch.clone, value)
            state, metrics = update(state, grads)
            return state, {"value": value, "norm": metrics.grad_norm, "told": told if differs == "metrics" else None}

        def fine(state: Any, x: Tensor) -> Any:
            return update(state, well(state, x)[1])

        state, x = fs.init_state(plan, opt, params=params), torch.full((4,), 1.0 + mesh.rank)
        before = tree.map(torch.clone, state.params)
        with pytest.raises((LossError, ReplicationError, PeerError)) as caught:
            fs.make_step(fn, plan)(state, x)
        same = all(map(torch.equal, tree.leaves(before), tree.leaves(state.params)))
        following, _ = fs.make_step(fine, plan)(state, x)
        return str(caught.value), same and following.step == 1


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("differs", ["count", "count of a mean", "metrics"])
def test_negative_counts_of_one_rank_are_refused_on_all(ranks: int, differs: str, reads: bool) -> None:
    for told, well in fs.virtual_mesh((ranks,), ("any",)).run(made, differs, reads):
        assert told.startswith(NEGATIVE) and told.count("below zero") == 1 and f"rank {ranks - 1}: below zero" in told
        assert well


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("differs", ["loss", "means", "names"])
def test_passes_of_two_kinds_are_refused_before_any_transfer(differs: str, reads: bool) -> None:
    for told, well in fs.virtual_mesh((2,), ("any",)).run(made, differs, reads):
        assert "pass 0 returns: rank 0: a tensor as the loss, and" in told and ", rank 1: a" in told
        assert well
