"""The script of the README runs as it stands, and what the README says that it prints is what it prints."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.prose import README_LINES, page
from tests.project.test_docs import blocks, quoted

README = Path(__file__).parents[2] / "README.md"
PAGE = README.parent / "docs" / "schedules.md"
MESH = 'fs.make_mesh((-1,), ("data",))'


def _script() -> str:
    return next(text for info, text, _ in blocks(README) if info == "python")


def _text(first: str, page: Path = README) -> str:
    return next(text for _, text, _ in blocks(page) if text.startswith(first))


@pytest.fixture(scope="module")
def planned() -> dict[str, Any]:
    """What the script has made before its loop, on a mesh of two ranks without processes."""
    script = _script()
    assert MESH in script
    names: dict[str, Any] = {}
    exec(script.replace(MESH, 'fs.abstract_mesh((2,), ("data",))').partition("    for i in range")[0], names)
    return names


def test_the_script_is_short() -> None:
    assert len(_script().splitlines()) < 40


def test_the_script_runs_and_prints_what_the_readme_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(_script(), str(README), "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    shown = [line for line in _text("step 20").splitlines() if line != "..."]
    assert len(printed) == 5 and len(shown) == 2
    for mine, theirs in zip(printed, shown, strict=False):
        values = [[float(x) for x in re.findall(r"[\d.]+", line)] for line in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], rel=0.05), mine
    assert names["full"]["blocks"]["0"]["1"]["weight"].shape == (64, 64)


def test_the_step_of_ones_own_follows_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text for info, text, _ in blocks(README) if info == "python"]
    own = next(text for text in texts if "fs.make_step" in text)
    names: dict[str, Any] = {}
    exec(compile(_script() + own, str(README), "exec"), names)
    assert names["step"].record == names["step"].schedule.ops
    assert names["metrics"]["loss"] > 0
    assert names["state"].step == 101


def test_the_plan_is_the_one_shown(planned: dict[str, Any]) -> None:
    assert quoted(_text("mesh data=2", PAGE), str(planned["plan"]))


def test_the_schedule_is_the_one_shown(planned: dict[str, Any]) -> None:
    schedule = planned["step"].trace({"x": torch.zeros(60, 2), "y": torch.zeros(60)}).schedule
    without_comments = re.sub(r" # .*", "", str(schedule))
    assert quoted(_text("fshard schedule", PAGE), without_comments)


def test_it_is_short_and_so_are_its_sentences() -> None:
    found = page(README)
    assert found.lines <= README_LINES and not found.long
