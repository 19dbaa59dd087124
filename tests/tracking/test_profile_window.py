"""Windows of steps under torch.profiler."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import PlanError


def trained(folder: Path, window: tuple[int, int], first: int = 0, steps: int = 5) -> list[str]:
    """The names in the trace of a run of so many steps."""
    mesh = fs.make_mesh((1,), ("data",))
    plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda p, x: (p["w"] * x).mean(), opt, plan)
    state = fs.init_state(plan, opt, params={"w": torch.ones(4)})
    for _ in range(first):
        state, _ = step(state, torch.ones(4))
    with fs.track([], step, profile=(*window, folder)) as track:
        for _ in range(steps):
            state, metrics = step(state, torch.ones(4))
            track(state.step, metrics)
    trace = folder / "rank0.json"
    return [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]] if trace.exists() else []


@pytest.mark.parametrize(
    ("window", "first", "count"), [((2, 3), 0, 2), ((1, 1), 0, 1), ((4, 9), 0, 2), ((2, 8), 6, 1), ((1, 2), 6, 0)]
)
def test_the_trace_has_the_ops_of_these_steps(tmp_path: Path, window: Any, first: int, count: int) -> None:
    names = trained(tmp_path / "traces", window, first)
    assert sum(name.startswith("fshard forward") for name in names) == count


@pytest.mark.parametrize("window", [(3, 2), (0, 2), 5, (1, 2, 3), (1.0, 2), ("a", "b"), (1,), (1, 2, "a", "b")])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(PlanError, match=r"profile=.* must be the first and the last step"):
        fs.track([], fs.make_mesh((1,), ("data",)), profile=window)
