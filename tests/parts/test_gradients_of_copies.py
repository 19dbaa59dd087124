"""Ranks that work on the same rows and hold copies of a leaf: gradients that differ are told by parts as by steps."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, tree
from fshard.errors import ReplicationError


def told(way: str, differs: bool) -> str:
    """On a rank: what a step says, with gradients of copies that differ along an axis without data."""
    with fs.make_mesh((1, 2), ("data", "tp")) as mesh:
        rank, params = mesh.rank, {"w": torch.ones(4), "b": torch.ones(2)}
        plan = fs.make_plan(params, mesh, [(".*", P())], batch=P("data"))

        def loss(p: Any, x: Any) -> Any:
            more = (p["b"] - p["b"].detach()).sum() * rank * differs  # as where a psum, or a pvary, is missing
            return (p["w"] * x).sum() + p["b"].sum() + more

        opt = fs.optim.sgd(0.1)
        grad, update = fs.value_and_grad(loss, plan, debug=way == "gradient"), fs.make_update(opt, plan)

        def fn(state: Any, x: Any) -> Any:
            return update(state, grad(state, x)[1])

        if way == "update":  # as if layers had been cut, so that the first update is compared
            update.updating.unproven = True
        step: Any = fn
        if way == "step":
            step = fs.make_step(fn, plan, debug=True)
        elif way == "train step":
            step = fs.make_train_step(loss, opt, plan, debug=True)
        state = fs.init_state(plan, opt, params=params)
        before = tree.map(torch.clone, state.params)
        try:
            state, _ = step(state, torch.ones(4))
        except ReplicationError as error:
            assert all(map(torch.equal, tree.leaves(before), tree.leaves(state.params)))
            return str(error)
        return f"step {state.step}"


@pytest.mark.parametrize("way", ["train step", "step", "update", "gradient"])
def test_gradients_that_differ_between_copies_are_told_by_every_way(way: str) -> None:
    first, second = fs.virtual_mesh((1, 2), ("any", "other")).run(told, way, True)
    assert first == second and "b  [2]: 1 on rank 0, 2 on 1" in first and "pvary" in first
    assert fs.virtual_mesh((1, 2), ("any", "other")).run(told, way, False) == ["step 1"] * 2
