"""Ctrl-C at any moment of a step: on all ranks the step is made, or on none of them."""

import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

import fshard as fs
from fshard.runtime.comm import exchange_text
from tests.faults.program import Fault, batch, differing, make_loss, snapshot, start
from tests.faults.test_atomic import STYLES, interruptible
from tests.shared.workers import Pools

pytestmark = pytest.mark.processes


class Press:
    """Presses Ctrl-C at the n-th line of the library that a step runs, or at the first one after it that it can.

    Before a step has taken the signal over it is as if it had not been called, and after it gave it back it is made:
    neither is part of a step.
    """

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if "fshard" not in frame.f_code.co_filename or frame.f_code.co_name == "__exit__":
            return None
        if event == "line":
            self.lines += 1
            taken = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            if taken and 0 <= self.at <= self.lines:
                self.at = -1
                signal.raise_signal(signal.SIGINT)
        return self


def traced(press: Press, call: Callable[[], Any]) -> Any:
    """Call while every line is watched."""
    sys.settrace(press)
    try:
        return call()
    finally:
        sys.settrace(None)


def pressing(style: str, count: int, ranks: list[int]) -> tuple[list[str], int, int]:
    """On a rank: steps with Ctrl-C at ``count`` moments; what is wrong, how many were made, and how many not."""
    kind, options = STYLES[style]
    out: list[str] = []
    made, given_up = 0, 0
    with interruptible(), fs.make_mesh((-1,), ("shard",), timeout=20.0) as mesh:
        plan, opt, state = start(mesh)
        comm = mesh.transport.communicator("control", mesh.axis_names)
        step = fs.make_train_step(make_loss(Fault(), kind), opt, plan, **options)
        state, _ = step(state, batch(0, mesh.rank))
        whole = Press(-1)
        state, _ = traced(whole, lambda: step(state, batch(1, mesh.rank)))
        for number in range(count):
            before = snapshot(state)
            press = Press(whole.lines * number // count if mesh.rank in ranks else -1)
            try:
                state, metrics = traced(press, lambda: step(state, batch(2 + made, mesh.rank)))  # noqa: B023
                end = "made"
            except (KeyboardInterrupt, fs.errors.PeerError) as error:
                end = "not made"
                out += [f"{press.lines}: {name} changed" for name in differing(before, snapshot(state))]
                if mesh.rank not in ranks and "KeyboardInterrupt" not in str(error):
                    out.append(f"{error}")
            ends = exchange_text(comm, end)
            if len(set(ends)) > 1:
                return [*out, f"at line {press.lines} of {whole.lines}: {ends}"], made, given_up
            made, given_up = made + (end == "made"), given_up + (end != "made")
        _, _, want = start(mesh)
        good = fs.make_train_step(make_loss(Fault(), kind), opt, plan, **options)
        for number in range(2 + made):
            want, _ = good(want, batch(number, mesh.rank))
        out += [f"{name} is not as without" for name in differing(snapshot(want), snapshot(state))]
    return out, made, given_up


@pytest.mark.parametrize(("style", "ranks"), [("plain", [1]), ("collectives", [0, 1])])
def test_ctrl_c_at_any_line_of_a_step(pool: Pools, style: str, ranks: list[int]) -> None:
    for wrong, made, given_up in pool(2).run(pressing, style, 40, ranks):
        assert not wrong, wrong
        assert made and given_up, (made, given_up)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("style", STYLES)
def test_ctrl_c_at_many_lines(pool: Pools, style: str, ranks: list[int]) -> None:
    for wrong, made, given_up in pool(2).run(pressing, style, 300, ranks, timeout=170.0):
        assert not wrong, wrong
        assert made and given_up, (made, given_up)
