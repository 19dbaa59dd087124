"""Every stage of ``make gpu`` runs on the CPU, and sees what is wrong where something is."""

import importlib
import json
import math
from pathlib import Path

import pytest
import torch

import fshard as fs
from tests.device import own
from tests.gpu import lane, parity, played, saving, syncs
from tests.gpu.place import Found, Place
from tests.gpu.stages import STAGES, TOTAL, UNTESTED

CPU = Place(torch.device("cpu"), short=True)
ALONE = ("marked", "bench")
"""Stages that start processes: the test of the command runs them."""
SHORT = ("parity", "lane", "syncs", "saving")
"""Stages that the default tests run; the slow ones run the others, whose parts are tests of their own."""


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is the only device: one of our own could not be given back at the end of a test."""
    monkeypatch.setattr(own, "found", lambda: None)


NAMES = [
    pytest.param(stage.name, marks=pytest.mark.long if stage.name in SHORT else pytest.mark.slow)
    for stage in STAGES
    if stage.name not in ALONE
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_runs_on_the_cpu_and_says_what_it_left_out(name: str, tmp_path: Path) -> None:
    found = Found(tmp_path / "found.json")
    importlib.import_module(f"tests.gpu.{name}").run(CPU, found)
    assert not found.problems and found.done and found.left_out
    assert json.loads(found.path.read_text())["done"] == found.done


def test_the_stages_fit_into_the_time() -> None:
    assert sum(stage.seconds for stage in STAGES) <= TOTAL == 1500


def test_the_pages_tell_the_stages_and_what_one_gpu_leaves_untested() -> None:
    pages = Path(__file__).parents[2] / "docs" / "gpus.md", Path(__file__).parent / "README.md"
    untested, stages = [" ".join(page.read_text().split()) for page in pages]
    assert [line for line in UNTESTED if line not in untested] == []
    assert [stage.what for stage in STAGES if f"| `{stage.name}` | {stage.what} |" not in stages] == []


def test_numbers_that_are_apart_are_problems(tmp_path: Path) -> None:
    found = Found(tmp_path / "found.json")
    found.near("a", 1.0, 1.01, 0.02)
    assert not found.problems
    found.near("b", 1.0, 1.1, 0.02)
    found.near("c", math.nan, 1.0, 0.02)
    assert [text[:2] for text in found.problems] == ["b:", "c:"]
    assert json.loads(found.path.read_text())["numbers"]["c: relative error"] == "nan"


def test_what_raises_is_a_problem_and_the_stage_goes_on(tmp_path: Path) -> None:
    found = Found(tmp_path / "found.json")
    with found.trying("a"):
        raise ValueError("no such thing\nat all")
    assert found.problems[0].startswith("a: ValueError: no such thing / at all (at test_stages.py:")
    with pytest.raises(torch.AcceleratorError), found.trying("b"):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_a_communicator_that_sends_something_else_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lane.NcclCommunicator.all_gather

    def halved(self: object, out: torch.Tensor, shard: torch.Tensor, after: object = None) -> object:
        return real(self, out[: len(out) // 2], shard[: len(out) // 2], after)  # type: ignore[arg-type]

    monkeypatch.setattr(lane.NcclCommunicator, "all_gather", halved)
    found = Found(tmp_path / "found.json")
    lane.run(CPU, found)
    assert any(text.startswith("all_gather, late input") for text in found.problems)
    assert not any("reduce_scatter:" in text for text in found.problems)


def test_losses_that_differ_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = parity.losses, iter(range(100))

    def other(*args: object, **options: object) -> object:
        found, norms, state = real(*args, **options)  # type: ignore[arg-type]
        factor = 1.01 if next(calls) % 2 else 1.0  # of every other run
        return [factor * value for value in found], norms, state

    monkeypatch.setattr(parity, "losses", other)
    found = Found(tmp_path / "found.json")
    parity.run(CPU, found)
    assert any("loss of step" in text for text in found.problems)


def test_lanes_that_are_not_waited_for_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = played._on_four(played.CASES["flat, nothing ahead"], CPU)
    want = played.trained(CPU, case, None)
    monkeypatch.setattr(played.Work, "wait", lambda self: None)
    try:
        assert repr(played.trained(CPU, case, 1.0)) != repr(want)
    except Exception as error:
        assert "nan" in str(error) or "finite" in str(error)


def test_a_second_read_of_the_device_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fshard.runtime.steps import consensus, readings

    real = consensus.tally

    def twice(*args: object) -> object:
        readings.read([1.0])
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("fshard.runtime.steps.runner.tally", twice)
    monkeypatch.setattr(syncs, "OPTIONS", {"plain": {}})
    monkeypatch.setattr(syncs, "KINDS", {})
    found = Found(tmp_path / "found.json")
    syncs.run(CPU, found)
    assert found.problems == [f"plain, {ranks} ranks: 2 reads of the device in a step" for ranks in (1, 2)]


def test_a_save_of_another_state_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fs.Checkpointer.save
    monkeypatch.setattr(fs.Checkpointer, "save", lambda self, state: real(self, _shifted(state)))
    found = Found(tmp_path / "found.json")
    saving.run(CPU, found)
    assert [text[:20] for text in found.problems] == ["the state of step 3:", "the state of step 5:"]


def _shifted(state: fs.TrainState) -> fs.TrainState:
    return state.replace(params=fs.tree.map(lambda leaf: leaf + 1, state.params))
