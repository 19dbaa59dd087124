"""The plan for the first 25 minutes of a card: its limits, what it keeps when it is cut, its table, its page."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import plan, runner
from tests.gpu.place import Found, Place
from tests.gpu.runner import Record
from tests.gpu.stages import LADDER, PLAN, STAGES, Stage
from tests.gpu.test_peers import bench as bench

CPU = Place(torch.device("cpu"), short=True)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_plan_fits_into_25_minutes_and_each_command_into_ten() -> None:
    assert len(PLAN) == 5 and len(LADDER) == 10
    assert sum(one.seconds for one in PLAN) == 1500 and max(one.seconds for one in PLAN) <= 570
    assert sum(stage.seconds for stage in PLAN[4].stages) <= PLAN[4].seconds


def test_every_stage_of_the_plan_is_there(bench: Any) -> None:
    known = {stage.name for stage in STAGES}
    for name in {stage.name for one in PLAN for stage in one.stages} - known:
        module, _, peer = name.partition(".")
        importlib.import_module(f"tests.gpu.{module}")
        assert module == "micro" or peer.partition(", ")[0] in bench.gpu_peers.PEERS, name


def test_the_page_tells_the_commands_and_what_they_decide() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gpus.md").read_text()
    assert [one.what for one in PLAN if f"| {one.what} | {one.decides} |" not in page] == []


SLOW = pytest.param("ladder.fshard fx graph, 16 rows", marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["ladder.fshard, 16 rows", SLOW, "micro"])
@pytest.mark.long
def test_a_stage_of_the_plan_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    module, _, rest = name.partition(".")
    found = Found(tmp_path / "found.json")
    importlib.import_module(f"tests.gpu.{module}").run(CPU, found, *filter(None, [rest]))
    assert not found.problems and found.done and found.left_out
    assert rest in found.numbers or not rest


def test_a_plan_that_is_cut_keeps_what_it_has_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run_stage(stage: Stage, *args: Any) -> dict[str, Any]:
        if len(ran) == 3:
            ran.append("cut")
            raise KeyboardInterrupt
        ran.append(stage.name)
        return {
            "what": stage.what,
            "status": "passed",
            "seconds": 1.0,
            "numbers": {stage.name: {"ms a step": [2, 1, 3]}},
        }

    monkeypatch.setattr(runner, "run_stage", run_stage)
    path = tmp_path / "x.json"
    with pytest.raises(KeyboardInterrupt):
        plan.run_plan(Record.open(path, True), (), 1e6, rest=True, short=True)
    assert [*json.loads(path.read_text())["stages"]] == ran[:3] == [stage.name for stage in PLAN[0].stages[:3]]
    said = capsys.readouterr().out
    assert said.index("1. make gpu") < said.index("5. make gpu") < said.index("ladder.eager")
    stages = plan.run_plan(Record.open(path, True), (), 1e6, rest=True, short=True)
    assert ran[4:] == [stage.name for stage in stages][3:] and len(set(ran)) == len(ran)
    lines = capsys.readouterr().out.partition("numbers\n")[2].splitlines()
    assert len(lines) == len(stages) and all(line.endswith("not run on a card") for line in lines)


def test_the_table_of_a_card_has_every_number_and_what_is_wrong(tmp_path: Path) -> None:
    record = Record(tmp_path / "x.json", {"dry": False, "stages": {}})
    record.keep("ladder.eager", {"status": "passed", "numbers": {"eager": {"ms": [75.25, 75, 76], "peak": 7}}})
    record.keep("ladder.fshard", {"status": "failed", "numbers": {}, "problems": ["fshard: no"]})
    text = plan.table(record)
    assert "ms 75.25 (75 .. 76), peak 7\n" in text and "ladder.fshard     " in text and "failed; fshard: no\n" in text
    rest = text.splitlines()[3:]
    assert len(rest) == sum(len(one.stages) for one in PLAN) - 2
    assert all(line.endswith("not reached; not run on a card") for line in rest)


def test_a_plan_runs_only_the_commands_that_were_asked_for() -> None:
    assert [number for number, _, _ in plan.chosen([2, 5])] == [2, 5] and len(plan.chosen(())) == 5


def test_a_product_that_cannot_be_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("only scales of whole tensors\nat a line")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    found = Found(tmp_path / "found.json")
    importlib.import_module("tests.gpu.micro").run(CPU, found)
    assert len(found.numbers) == 5 and not found.problems
    assert "64 x 32 by 96, float8: only scales of whole tensors" in found.left_out
    assert all(numbers["bf16"] > 0 for name, numbers in found.numbers.items() if " by " in name)
