"""Steps under torch.compile: an error that says what to do, and a step that works as before."""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import TransformError
from tests.mistakes.cases import BATCH, PLAN, loss, st, step


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Dynamo forgets what it has compiled."""
    torch._dynamo.reset()


@pytest.mark.long
def test_a_train_step_says_how_to_compile() -> None:
    made = step()
    inside: list[Any] = [made, lambda state, batch: made(state, batch)[1].loss * 2]
    for fn in inside:
        with pytest.raises(
            TransformError, match=r"inside of torch\.compile.*make_train_step\(\.\.\., compile='inductor'"
        ):
            torch.compile(fn)(st(), BATCH)
    assert made(st(), BATCH)[1].loss.isfinite()


def test_an_eval_step_says_so_too() -> None:
    evaluate = fs.make_eval_step(loss, PLAN)
    with pytest.raises(TransformError, match=r"an eval step was called inside of torch\.compile"):
        torch.compile(evaluate)(st(), BATCH)
    assert evaluate(st(), BATCH).isfinite()


def test_dynamos_own_error_has_the_text() -> None:
    with pytest.raises(Exception, match="make_train_step") as caught:
        torch.compile(step(), fullgraph=True)(st(), BATCH)
    assert "torch._dynamo" in type(caught.value).__module__


@pytest.mark.long
def test_parts_and_their_steps_say_so_too() -> None:
    opt = fs.optim.sgd(0.1)
    grad, update = fs.value_and_grad(loss, PLAN), fs.make_update(opt, PLAN)
    made = fs.make_step(lambda state, batch: update(state, grad(state, batch)[1]), PLAN)
    for fn, what in ((grad, "a gradient"), (made, "a train step of parts")):
        with pytest.raises(TransformError, match=rf"{what} was called inside .*value_and_grad\(\.\.\., compile='ind"):
            torch.compile(fn)(st(), BATCH)
    with pytest.raises(TransformError, match="a gradient was called inside"):
        torch.compile(lambda params, batch: grad(params, batch)[0] * 2)(st().params, BATCH)
    with pytest.raises(TransformError, match="an update was called inside .* call it as it is"):
        torch.compile(update)(st(), grad(st(), BATCH)[1])
    with pytest.raises(TransformError, match="a gradient was called inside"):
        fs.make_step(torch.compile(lambda state, batch: update(state, grad(state, batch)[1])), PLAN)(st(), BATCH)
    state, metrics = made(fs.init_state(PLAN, opt, seed=0), BATCH)
    assert metrics.grad_norm.isfinite()
