"""The runner of ``make gpu``: each stage ends alone, the file is written after each, and a second run goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import runner
from tests.gpu.runner import Record, run_stages
from tests.gpu.stages import STAGES, UNTESTED, Stage

ROOT = Path(__file__).parents[2]
CHILD = """
import json, os, sys, time
name, out = sys.argv[1], sys.argv[3]
print("begun", flush=True)
def write(**found):
    with open(out, "w") as file: json.dump({"numbers": {}, "problems": [], "left_out": [], "done": 1, **found}, file)
write(numbers={"half": 1.5})
if name == "hangs": time.sleep(60)
if name == "dies": os.kill(os.getpid(), 9)
if name == "raises": raise ValueError("no such thing")
if name == "wrong": write(problems=["1 is not 2"]); sys.exit(3)
if name == "idle": write(done=0, left_out=["a GPU"])
"""


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a script in the place of the real ones."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([sys.executable, str(script), *command[4:]], **options)

    monkeypatch.setattr(runner.subprocess, "Popen", popen)


NAMES = ("good", "hangs", "dies", "raises", "wrong", "idle", "late")


@pytest.mark.usefixtures("children")
@pytest.mark.processes
def test_every_stage_ends_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = {name: 1.0 if name == "hangs" else 30.0 for name in NAMES}
    stages = [Stage(name, f"what {name} does", limits[name], limits[name]) for name in NAMES]
    record = Record.open(tmp_path / "results" / "x.json", True)
    run_stages(record, stages[:-1], 60)
    run_stages(record, stages[-1:], 0.5)
    content = json.loads(record.path.read_text())
    found = content["stages"]
    assert {name: found[name]["status"] for name in NAMES} == {
        "good": "passed",
        "hangs": "timed out",
        "dies": "failed",
        "raises": "failed",
        "wrong": "failed",
        "idle": "needs hardware",
        "late": "not reached",
    }
    assert found["hangs"]["numbers"] == {"half": 1.5} and found["hangs"]["output"] == ["begun"]
    assert found["dies"]["exit"] == -9 and found["raises"]["output"][-1] == "ValueError: no such thing"
    assert content["untested"] == list(UNTESTED) and content["dry"] is True
    said = capsys.readouterr().out
    assert "| ValueError: no such thing" in said and "wrong: 1 is not 2" in said and "not done: a GPU" in said
    assert not record.good(stages) and record.good([stages[0], stages[5]])


@pytest.mark.usefixtures("children")
@pytest.mark.processes
def test_a_second_run_keeps_what_is_of_the_same_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, stage = tmp_path / "x.json", Stage("good", "", 5.0, 5.0)
    run_stages(Record.open(path, True), [stage], 60)
    assert Record.open(path, True).has("good")
    monkeypatch.setattr(runner, "sources", lambda: "others")
    assert not Record.open(path, True).has("good")


def test_a_python_without_what_stages_need_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.missing() == []
    monkeypatch.setattr(runner, "NEEDED", ("optree", "no_such_package"))
    assert runner.missing() == ["no_such_package"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--short", "--results", str(tmp_path / "x.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line in done.stdout for line in UNTESTED)


@pytest.mark.long
@pytest.mark.processes
def test_a_short_dry_run_of_a_stage(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "x.json", True)
    run_stages(record, [stage for stage in STAGES if stage.name == "lane"], 60, short=True)
    found = json.loads(record.path.read_text())["stages"]["lane"]
    assert found["status"] == "passed" and found["done"] > 30 and "gloo" in found["left_out"][0]
