"""Two captures of a step, some steps apart, are equal in every number and address that reaches an operator.

What changes from step to step is in device memory that does not move. A step of any kind that the tests of waits know
is captured so, or refused by name.
"""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import fshard as fs
from fshard.runtime.memory.step_memory import StepMemory
from tests.device import cases, waits
from tests.shared.capture_device import CaptureDevice, RecordedGraph, capturing, differences

REFUSED = {
    "in backward": "needs update='deferred'",
    "8-bit moments": "adamw8bit reads its rate or its count from the host",
    "every second": "every reads its rate",
    "update in backward": "needs update='deferred'",
    "feedback": "leave something for the next step",
    "low rank": "leave something for the next step",
    "host": "is kept in memory of the host, or updated there",
    "outer": "the host steers exchanges",
    "optimizer: muon": "partition reads its rate",
    "optimizer:": "reads its rate or its count from the host: the optimizers adamw and sgd can be captured",
}
"""By a part of a kind's name, why no graph holds its steps; the first that matches counts."""

KINDS = {name: kind for name, kind in waits.KINDS.items() if name != "parts" and not name.startswith("alone")}
"""All that are train steps."""

IN_SEGMENTS = (
    *("collectives", "dropout, 2 ranks", "stochastic rounding, 2 ranks", "layout: opt axes, whole gradients"),
    *("wire: replicas, all axes", "graphs, 2 ranks", "packed: int4/32", "layout: some whole, default"),
)
"""Kinds whose segments are compared."""


def captured(kind: waits.Kind, graph: str = "step") -> list[RecordedGraph]:
    """Rank 0's captures of the third step of a kind, and of the fifth."""
    real = fs.make_train_step

    def rank() -> list[RecordedGraph]:
        mesh, device = on(fs.make_mesh(*kind.axes))
        steps: list[Any] = []

        def made(*args: Any, schedule: Any = None, **options: Any) -> Any:
            asked = replace(schedule or fs.Policy(), graph=graph)
            steps.append(real(*args, schedule=asked, **options))
            return steps[-1]

        with pytest.MonkeyPatch.context() as change:
            change.setattr(fs, "make_train_step", made)
            run = kind.make(mesh)
        for number in (0, 1, 2, 3, 3):
            run(number)
        again(steps[0], device)
        run(3)
        return device.graphs

    with capturing() as on:
        return fs.virtual_mesh(*kind.axes, device="cpu").run(rank)[0]


def again(step: Any, device: CaptureDevice) -> None:
    """Let a step capture once more."""
    assert len(device.graphs) == 1 and step.latest.graph == "replayed", step.latest.graph
    for graph in step._runner.held:
        graph.replay = None


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", KINDS)
def test_two_later_steps_are_equal_but_for_the_dials(name: str) -> None:
    why = next((why for part, why in REFUSED.items() if part in name), "")
    if why:
        with pytest.raises(fs.errors.PlanError, match=f"(?s){why}"):
            captured(KINDS[name])
        return
    first, second = captured(KINDS[name])
    assert len(first.records) > 10 and differences(first, second) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", IN_SEGMENTS)
def test_two_later_steps_have_equal_segments(name: str) -> None:
    first, second = captured(KINDS[name], "segments")
    assert len(first.cuts) > 4 and differences(first, second) == []


def drifting(held: list[float]) -> Any:
    """A loss with a number that changes from call to call."""

    def loss(p: Any, batch: Any) -> Tensor:
        held[0] += 1
        return cases.loss(p, batch) * held[0]

    return loss


def test_the_audit_sees_a_number_that_changes() -> None:
    kind = waits.Kind(waits.ONE, lambda mesh: waits.of_layers(mesh, drifting([0.0])))
    with pytest.MonkeyPatch.context() as change:
        change.setattr("fshard.runtime.graphs.surroundings.Surroundings.holds", lambda self: True)
        first, second = captured(kind)
    assert any("aten.mul" in line for line in differences(first, second))


def test_the_audit_sees_memory_that_is_freed() -> None:
    """Such as gradients that give theirs back after each update, as they do without graphs."""
    real = StepMemory.__init__
    with pytest.MonkeyPatch.context() as change:
        change.setattr(StepMemory, "__init__", lambda self, *args: real(self, *args[:4], False))
        with pytest.warns(UserWarning, match="a graph frees memory from before its capture"):
            with pytest.raises(AssertionError, match="eager"):
                captured(KINDS["clipping by rule, 2 ranks"])
