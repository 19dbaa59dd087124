"""A rank of a run in which rank 1 gets stuck in its loss function at the third step, or does worse."""

import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import fshard as fs
from fshard.runtime.flight.rank_records import read_records
from fshard.runtime.flight.verdict import verdict

BEFORE = 2
"""Steps that all ranks make."""


def main() -> None:
    """Train until something ends it."""
    train(30.0, lambda: time.sleep(120))


def named() -> str:
    """Train until the other rank's wait has timed out, and return what this one is told."""
    try:
        train(2.0, lambda: time.sleep(5))
    except fs.errors.CommError as error:
        return str(error)
    return ""


def told(temp: str) -> tuple[str, str]:
    """The error of a rank that has waited too long, and what the records say that it names; the other one waits."""
    looked = Path(temp, "looked")

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not looked.exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    with mock.patch.object(tempfile, "tempdir", temp):
        try:
            train(2.0, wait)
        except fs.errors.CommError as error:
            folder = re.search("`fshard trace (.*)`", str(error))
            seen = verdict(read_records(Path(folder[1]))) if folder else ""
            looked.touch()
            return str(error), seen
    return "", ""


def slow(temp: str) -> tuple[list[str], str]:
    """Train with a rank that is slow once, and return the records that it saw, and what was raised."""
    seen: list[str] = []

    def sleep() -> None:
        deadline = time.monotonic() + 3.7
        while len(seen) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
            seen[:] = sorted(path.name for path in Path(temp).glob("fshard-*/*.flight"))

    with mock.patch.object(tempfile, "tempdir", temp):
        try:
            train(4.0, sleep)
        except fs.errors.ShardError as error:
            return seen, str(error)
    return seen, ""


def killed(temp: str) -> None:
    """Train until rank 1 kills itself."""
    tempfile.tempdir = temp
    try:
        train(30.0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    except fs.errors.CommError as error:
        print(f"CommError: {error}")
        sys.stdout.flush()
        os._exit(0)  # leaving the process group would wait for the other rank


def mistaken(temp: str) -> list[str]:
    """The errors of mistakes that rank 1 makes after steps: in a loss, and before ranks have met in a step."""
    found = []
    with mock.patch.object(tempfile, "tempdir", temp), fs.make_mesh((-1,), ("shard",), timeout=20.0) as mesh:
        params, wrong = {"w": torch.eye(4)}, [False]

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return (x @ params["w"]).sum() * (1 // (not (wrong[0] and mesh.rank)))

        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))])
        opt = fs.optim.sgd(0.1)
        step, first = fs.make_train_step(loss, opt, plan), fs.init_state(plan, opt, params=params)
        state, _ = step(first, torch.ones(2, 4))
        given: list[tuple[Any, Callable[..., Any]]] = [(state, step), (first, step), (3, step)]
        for number, (value, call) in enumerate(given):
            wrong[0] = number == 0
            try:
                call(value if mesh.rank else state, torch.ones(2, 4))
            except Exception as error:
                found.append(type(error).__name__)
        step(state, torch.ones(2, 4))
    return found


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train(timeout: float, act: Callable[[], object]) -> None:
    """Train, with a rank that does something in the third step."""
    with fs.make_mesh((-1,), ("shard",), timeout=timeout) as mesh:
        calls = [0]

        @fs.unit
        def layer(params: Any, x: torch.Tensor) -> torch.Tensor:
            if mesh.rank == 1 and not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
                calls[0] += 1
                if calls[0] == 2 * BEFORE + 1:
                    print("stuck", flush=True)
                    act()
            return torch.tanh(x @ params["w"])

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return layer(params["b"], layer(params["a"], x)).square().mean()

        params = {name: {"w": torch.eye(64)} for name in "ab"}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], units=("*",))
        opt = fs.optim.sgd(0.1)
        step = fs.make_train_step(loss, opt, plan)
        state = fs.init_state(plan, opt, params=params)
        for _ in range(5):
            state, _ = step(state, torch.ones(4, 64))
