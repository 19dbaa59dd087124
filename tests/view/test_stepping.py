"""A step op by op: buffers of all ranks at each op, and the same result as the step itself."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError, TreeError

NET = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
MODEL = fs.split(NET, units=("0", "2"))
BATCH = torch.linspace(-1, 1, 24).view(4, 6)
OPT = fs.optim.adamw(1e-2)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return MODEL.apply(params, x).square().mean()


def ranks() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.fixture
def made() -> tuple[Any, Any, fs.Plan]:
    """A step, its state after one step, and the plan."""
    plan = fs.make_plan(MODEL, fs.virtual_mesh((2,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    step = fs.make_train_step(loss, OPT, plan)
    state, _ = step(fs.init_state(plan, OPT, seed=1), BATCH)
    return step, state, plan


@pytest.mark.long
def test_op_by_op_it_is_the_step(made: Any) -> None:
    step, state, plan = made
    expected, metrics = fs.make_train_step(loss, OPT, plan, donate=False)(state, BATCH)
    random = torch.get_rng_state()
    stepping = fs.view.step_through(step, state, BATCH)
    assert stepping.position == 0 and str(stepping.op) == "handshake"
    for number in range(len(stepping.schedule)):
        assert stepping.position == number
        stepping.next()
    result, told = stepping.finish()
    assert result == expected and torch.equal(told.loss, metrics.loss) and stepping.op is None
    assert torch.equal(random, torch.get_rng_state()) and not ranks()
    assert step(result, BATCH)[0].step == 3


def test_buffers(made: Any) -> None:
    step, state, plan = made
    whole = dict(fs.tree.paths(state.params))
    stepping = fs.view.step_through(step, state, BATCH)
    with pytest.raises(PlanError, match="2 is not gathered on rank 1 before op 0, 'handshake'"):
        stepping.gathered("2", rank=1)
    stepping.until("after wait all_gather 2")
    for rank in range(2):
        for path, leaf in stepping.gathered("2", rank).items():
            assert torch.equal(leaf, whole[path])
    parts = [stepping.shard("2", rank)["2.weight"] for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole["2.weight"].reshape(-1))
    assert "->" in str(stepping) and "readable on rank 0: 0, 2" in str(stepping) and "<table" in stepping._repr_html_()
    stepping.until("before reduce_scatter 2")
    rows = BATCH.view(2, 2, 6)
    for rank in range(2):
        plain = {path: leaf.clone().requires_grad_() for path, leaf in whole.items()}
        loss(fs.tree.nest(plain), rows[rank]).backward()
        grads = stepping.gradient("2", rank)
        assert grads.keys() == {"2.weight", "2.bias"}
        for path, grad in grads.items():
            torch.testing.assert_close(grad * plan.mesh.size, plain[path].grad)
    stepping.until("before consensus")
    with pytest.raises(PlanError, match="holds no full gradient of 2"):
        stepping.gradient("2")
    stepping.finish()
    with pytest.raises(PlanError, match="the step is over"):
        stepping.shard("2")


def test_giving_up_leaves_the_state(made: Any) -> None:
    step, state, _ = made
    before = dict(fs.tree.paths(state.params))
    with fs.view.step_through(step, state, BATCH) as stepping:
        stepping.until("before forward 0")
    assert not ranks() and all(torch.equal(leaf, before[path]) for path, leaf in fs.tree.paths(state.params))
    state, _ = step(state, BATCH)
    assert state.step == 2


def test_an_error_of_the_loss_is_raised_where_it_happens(made: Any) -> None:
    _, state, plan = made

    def broken(params: Any, x: torch.Tensor) -> torch.Tensor:
        value = loss(params, x)
        if not isinstance(x, torch._subclasses.FakeTensor) and plan.mesh.rank == 1:
            raise ValueError("only on rank 1")
        return value

    stepping = fs.view.step_through(fs.make_train_step(broken, OPT, plan), state, BATCH)
    stepping.until("before backward 2")
    with pytest.raises(ValueError, match="only on rank 1"):
        stepping.finish()
    assert not ranks()


def test_bad_breakpoints_and_arguments(made: Any) -> None:
    step, state, plan = made
    with fs.view.step_through(step, state, BATCH) as stepping:
        for place, text in (("forward 0", "give 'before' or 'after'"), ("before forward 9", "no such op is ahead")):
            with pytest.raises(PlanError, match=text):
                stepping.until(place)
        with pytest.raises(TreeError, match="no group 'x'"):
            stepping.gathered("x")
        with pytest.raises(TreeError, match="ranks 0 to 1"):
            stepping.gathered("0", rank=2)
        stepping.until("before forward 2")
        with pytest.raises(PlanError, match="no such op is ahead of op"):
            stepping.until("before handshake")
    real = fs.make_plan(MODEL, fs.make_mesh((1,), ("shard",)), [(".*", fs.P())])
    with pytest.raises(PlanError, match="a train step of a plan on fs.virtual_mesh"):
        fs.view.step_through(fs.make_train_step(loss, OPT, real), fs.init_state(real, OPT), BATCH)
    with pytest.raises(TreeError, match="the state of all ranks"):
        fs.view.step_through(step, plan.mesh.run(lambda: fs.init_state(plan, OPT))[0], BATCH)  # type: ignore[attr-defined]
