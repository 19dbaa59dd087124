"""Whole tensors of a state of all ranks: a write to them is seen by every reader, or it raises."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import TreeError

Write = Callable[[Tensor], Any]

WRITES: dict[str, Write] = {
    "mul_": lambda w: w.mul_(0),
    "data": lambda w: w.data.mul_(0),
    "index": lambda w: w.__setitem__(0, 7.0),
    "numpy": lambda w: w.numpy().fill(3.0),
    "copy_": lambda w: w.copy_(w.flip(0)),
    "out": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "init": torch.nn.init.zeros_,
    "view": lambda w: w.view(-1)[1:].add_(1),
}

PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "params": lambda state, _: state.params,
    "opt_state": lambda state, _: state.opt_state[KEPT],
    "unshard": lambda state, plan: fs.unshard(state.params, plan),
    "unshard momentum": lambda state, plan: fs.unshard(state.opt_state[KEPT], plan),
    "join": lambda state, plan: plan.mesh.join(plan.mesh.run(lambda: fs.unshard(state.params, plan))),
}


def loss(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).square().mean() + p["b"].square().sum()


def made(mesh: Any) -> tuple[fs.Plan, Any, Any]:
    params = {"w": torch.arange(1.0, 6.0), "b": torch.arange(1.0, 3.0)}
    plan = fs.make_plan(params, mesh, [("w", fs.fsdp("data")), ("b", fs.P())], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1, momentum=0.9)
    step = fs.make_train_step(loss, opt, plan, donate=False)
    return plan, step, step(fs.init_state(plan, opt, params=params), BATCH)[0]


KEPT = "momentum_buffer"
BATCH = torch.arange(20.0).view(4, 5) / 20


def held(state: Any, plan: fs.Plan) -> dict[str, Tensor]:
    """The whole tensors of what the ranks hold."""
    mesh: Any = plan.mesh
    parts = mesh.run(lambda: (fs.unshard(state.params, plan), fs.unshard(state.opt_state[KEPT], plan)))
    return leaves(*parts[0])


def leaves(*trees: Any) -> dict[str, Tensor]:
    return {f"{i}.{name}": leaf for i, one in enumerate(trees) for name, leaf in one.items()}


def test_a_write_is_seen_by_all_or_raises() -> None:
    plan, _, state = made(fs.virtual_mesh((2,), ("data",)))
    before, raised = held(state, plan), set()
    for place, write in itertools.product(PLACES, WRITES):
        WRITES[write](PLACES[place](state, plan)["w"])
        try:
            seen = leaves(state.params, state.opt_state[KEPT])
            fs.settle(state)
        except TreeError as error:
            assert "read-only" in str(error) and "w: was written to in place" in str(error)
            raised.add((place, write))
        else:
            assert all(torch.equal(x, before[n]) for n, x in seen.items()), (place, write)
    assert all(torch.equal(x, before[n]) for n, x in held(state, plan).items())
    assert raised == set(itertools.product(("params", "opt_state"), WRITES))


def test_writes_that_only_a_step_can_find() -> None:
    plan, step, state = made(fs.virtual_mesh((2,), ("data",)))
    first = state.params["w"]
    assert state.params["b"].sum() > 0
    first.zero_()  # of an earlier reading
    with pytest.raises(TreeError, match=r"state.params.w: was written to in place"):
        step(state, BATCH)
    state.params["w"] = torch.zeros(5)
    with pytest.raises(TreeError, match=r"state.params.w: was replaced"):
        fs.settle(state)
    kept = plan.mesh.join(plan.mesh.run(lambda: {"b": state.params["b"]}))["b"]  # type: ignore[attr-defined]
    kept.zero_()  # rank 0's own shard
    with pytest.raises(TreeError, match="read-only"):
        step(state, BATCH)


def test_leaves_of_ranks_can_be_mapped_as_the_error_says() -> None:
    plan, step, state = made(fs.virtual_mesh((2,), ("data",)))
    mesh: Any = plan.mesh
    assert state.opt_state[KEPT]["w"].abs().sum() > 0
    mesh.run(lambda: state.opt_state[KEPT]["w"].zero_())  # the shards themselves: outside sees it, and so does a step
    assert not state.opt_state[KEPT]["w"].any()
    double = mesh.join(mesh.run(lambda: fs.tree.map(lambda x: 2 * x if isinstance(x, Tensor) else x, state)))
    assert torch.equal(double.params["w"], 2 * state.params["w"])
    assert step(double, BATCH)[0].step == 2
