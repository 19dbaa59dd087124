"""Calls of the library from several threads, and states that are made under ``torch.inference_mode()``."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from tests.mistakes.test_misuse import batch_of, loss, made, model
from tests.shared.bad import Raised, attempt
from tests.shared.workers import Pools


def in_thread(call: Callable[[], Any]) -> Raised | None:
    """What a call raises in a thread of its own."""
    out: list[Raised | None] = []
    thread = threading.Thread(target=lambda: out.append(attempt(call)))
    thread.start()
    thread.join()
    return out[0]


def beside(mesh: fs.Mesh, ranks: int) -> tuple[Raised | None, float, float]:
    """What an evaluation raises that some ranks make in a thread while a step runs, and the losses of two steps."""
    plan = made(mesh=mesh)[0].plan
    ask, raised = fs.make_eval_step(model, plan), list[Raised | None]()
    armed = False

    def fn(p: Any, batch: Any) -> Any:
        if armed and not raised and mesh.rank < ranks:
            raised.append(in_thread(lambda: ask(state, batch_of()["x"])))
        return loss(p, batch)

    step, state = made(fn, mesh)
    state, first = step(state, batch_of())
    armed = True
    state, second = step(state, batch_of())
    if mesh.rank >= ranks:
        raised.append(attempt(lambda: ask(state, batch_of()["x"])))
    ask(state, batch_of()["x"])
    return raised[0], first.loss.item(), second.loss.item()


def test_a_thread_that_calls_beside_a_step_is_refused() -> None:
    """Both would use the same memory: gradients were wrong without a word."""
    raised, *losses = beside(fs.make_mesh((-1,), ("shard",)), 1)
    assert raised is not None and "ScheduleError" in raised.kinds and "one after the other" in raised.text
    step, state = made()
    for want in losses:
        state, metrics = step(state, batch_of())
        assert metrics.loss.item() == want


def on_ranks(ranks: int) -> tuple[Raised | None, float, float]:
    """The same on a rank of a job."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        return beside(mesh, ranks)


def test_such_a_thread_costs_no_other_rank_its_mesh(pool: Pools) -> None:
    for ranks in (2, 1):
        (here, *losses), (there, *same) = pool(2).run(on_ranks, ranks)
        assert losses == same and here is not None and there is not None
        assert "ScheduleError" in here.kinds and "one after the other" in there.text
        assert ("ScheduleError" if ranks == 2 else "PeerError") in there.kinds


def test_threads_may_take_turns() -> None:
    step, state = made()
    assert in_thread(lambda: step(state, batch_of())) is None


WAYS: dict[str, Callable[[fs.TrainState], fs.TrainState]] = {
    "init_state": lambda state: fs.init_state(
        state.plan, fs.optim.sgd(0.1), params=fs.unshard(state.params, state.plan)
    ),
    "reshard_state": lambda state: fs.reshard_state(state, state.plan, fs.optim.sgd(0.1)),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_state_made_in_inference_mode_can_be_trained(way: str) -> None:
    step, state = made()
    with torch.inference_mode():
        new = WAYS[way](state)
    for _ in range(2):
        state, want = step(state, batch_of())
        new, got = step(new, batch_of())
        assert want.loss == got.loss
