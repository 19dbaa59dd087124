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
    first = fs.value_and_grad(loss, plan, only="w")

    def fn(state: Any, batch: Any) -> Any:
        if kind == "piecewise":
            float(batch.sum())
        value, grads = grad(state, batch)
        state, _ = update(state, grads)
        return state, {"loss": value}

    def alone(state: Any, batch: Any) -> Any:
        first(state, batch)  # it does not train b, whose update is due now
        return update(state, grad(state, batch)[1])

    steps = {"train": lambda: fs.make_train_step(loss, OPT, plan), "parts alone": lambda: alone}
    step: Any = steps.get(kind, lambda: fs.make_step(fn, plan))()
    return step, lambda: fs.init_state(plan, OPT, params=params)


class Stop:
    """A profile function that sends this process a signal at the so-manieth event of this thread."""

    def __init__(self, at: int, number: int = signal.SIGINT) -> None:
        self.at, self.count, self.number = at, 0, number

    def __call__(self, _: Any, event: str, __: Any) -> None:
        if event == "return":  # the kept traceback of a signal here would hold the frame that returns, and its value
            return
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), self.number)


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
    interrupted(kind, fs.virtual_mesh((ranks,), ("data",)), points)


def interrupted(kind: str, mesh: fs.Mesh, points: int) -> None:
    """Loops that are interrupted at so many points come to the same states."""
    step, first = made(kind, mesh)
    want, count = after(step, first()).params, Stop(-1)
    loop(step, first(), count, [])
    draw, kept = random.Random(f"{kind} {mesh.size} {points}"), list[Any]()
    for at in draw.sample(range(1, count.count), min(points, count.count - 1)):
        state = loop(step, first(), Stop(at), kept)
        number = state.step
        assert all(leaf.isfinite().all() for leaf in fs.tree.leaves(state.params)), (at, number)  # it can be read
        got = after(step, state).params
        assert all(torch.equal(got[path], leaf) for path, leaf in want.items()), (at, number)


@pytest.mark.parametrize(
    "points", [pytest.param(10, marks=pytest.mark.long), pytest.param(200, marks=pytest.mark.slow)]
)
def test_an_interrupt_between_parts_that_run_alone_loses_no_state(points: int) -> None:
    with fs.make_mesh((1,), ("data",)) as mesh:
        interrupted("parts alone", mesh, points)


def test_an_alarm_applies_no_update_twice() -> None:
    """A reading applies the update that waits: local work, which an alarm does not stop half way."""
    step, first = made("train", fs.virtual_mesh((1,), ("data",)))

    def read(stop: Stop) -> Any:
        state, _ = step(first(), BATCH)
        try:
            sys.setprofile(stop)
            _ = state.params
        except TimeoutError:
            stop.at = 0
        finally:
            sys.setprofile(None)
        return state.params

    def alarm(number: int, frame: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, alarm)
    try:
        read(Stop(-1))  # the first run makes calls that no other one does
        want, count = read(counted := Stop(-1)), counted.count
        for at in range(1, count, 7):
            stop = Stop(at, signal.SIGALRM)
            got = read(stop)
            assert stop.at == 0 and all(torch.equal(got[path], leaf) for path, leaf in want.items()), at
    finally:
        signal.signal(signal.SIGALRM, before)
