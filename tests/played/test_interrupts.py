"""Interrupts at any point of a loop, in its main thread and in those of its ranks: the state is never lost."""

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P

OPT = fs.optim.adamw(0.1)
BATCH = torch.linspace(-1, 1, 24).view(8, 3)
STEPS = 3


def loss(params: Any, x: Any) -> Any:
    """A mean over rows."""
    return (x @ params["w"].T + params["b"]).square().mean()


def made(kind: str, mesh: fs.Mesh) -> tuple[Any, Callable[[], Any]]:
    """A step of a kind, and what makes its first state."""
    params = {"w": torch.linspace(1, 2, 12).view(4, 3), "b": torch.ones(4)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))], batch=P("data"))
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(OPT, plan)

    def fn(state: Any, batch: Any) -> Any:
        if kind == "piecewise":
            float(batch.sum())
        value, grads = grad(state, batch)
        state, _ = update(state, grads)
        return state, {"loss": value}

    step: Any = fs.make_train_step(loss, OPT, plan) if kind == "train" else fs.make_step(fn, plan)
    return step, lambda: fs.init_state(plan, OPT, params=params)


class Stop:
    """A profile function that sends this process SIGINT at the so-manieth event of this thread."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def __call__(self, *_: Any) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def loop(step: Any, state: Any, stop: Stop, kept: list[Any]) -> Any:
    """What a cell of a notebook does, which is stopped: the state that its variable holds then."""
    try:
        sys.setprofile(stop)
        while state.step < STEPS:
            _ = state.params  # the step that takes this state empties these tensors, too
            state, _ = step(state, BATCH)
    except KeyboardInterrupt as error:
        kept[:] = [error.__traceback__]  # as notebooks keep that of the latest error
    finally:
        sys.setprofile(None)
    return state


def after(step: Any, state: Any) -> Any:
    """The state after all steps, whatever is raised late."""
    while state.step < STEPS:
        try:
            state, _ = step(state, BATCH)
        except KeyboardInterrupt:
            continue
    return state


@pytest.mark.parametrize("kind", ["train", "parts", "piecewise"])
@pytest.mark.parametrize(
    ("ranks", "points"),
    [pytest.param(2, 5, marks=pytest.mark.long), *[pytest.param(n, 60, marks=pytest.mark.slow) for n in (1, 2)]],
)
@pytest.mark.filterwarnings("ignore:.*run one by one")
def test_an_interrupt_at_any_point_loses_no_state(kind: str, ranks: int, points: int) -> None:
    step, first = made(kind, fs.virtual_mesh((ranks,), ("data",)))
    want, count = after(step, first()).params, Stop(-1)
    loop(step, first(), count, [])
    draw, kept = random.Random(f"{kind} {ranks} {points}"), list[Any]()
    for at in draw.sample(range(1, count.count), min(points, count.count - 1)):
        state = loop(step, first(), Stop(at), kept)
        number = state.step
        assert all(leaf.isfinite().all() for leaf in fs.tree.leaves(state.params)), (at, number)  # it can be read
        got = after(step, state).params
        assert all(torch.equal(got[path], leaf) for path, leaf in want.items()), (at, number)
