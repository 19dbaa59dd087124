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
