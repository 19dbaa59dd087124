"""Threads of ranks that the machine lets end a moment after their run: they hold no state that a step has returned."""

import time

import pytest
import torch

import fshard as fs
from fshard.played.cooperative import Gate


@pytest.mark.filterwarnings("ignore:.*run one by one")
def test_a_result_that_cannot_be_joined_gives_the_state_back(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Gate.set

    def late(self: Gate) -> None:
        opened(self)
        time.sleep(0.2)  # the run is over, and the thread is not

    monkeypatch.setattr(Gate, "set", late)
    plan = fs.make_plan({"w": torch.ones(4)}, fs.virtual_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(0.1)
    gradient = fs.value_and_grad(lambda params, x: (params["w"] * x).sum(), plan)
    update = fs.make_update(opt, plan)

    def fn(state: fs.TrainState, batch: torch.Tensor) -> tuple[fs.TrainState, dict[str, object]]:
        loss, grads = gradient(state, batch)
        state, _ = update(state, grads)
        return state, {"loss": loss, **({} if joined else {"grads": grads})}

    both, joined = fs.make_step(fn, plan), False
    state = fs.init_state(plan, opt, params={"w": torch.ones(4)})
    with pytest.raises(fs.errors.ShardError):
        both(state, torch.ones(2, 4))
    joined = True
    state, _ = both(state, torch.ones(2, 4))
    assert state.step == 1
