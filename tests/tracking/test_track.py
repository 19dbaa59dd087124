"""What a run tells reaches its trackers, unchanged; and what only looks at a run never stops it."""

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import PlanError
from fshard.played.cooperative import playing
from fshard.tracking import tracker
from fshard.tracking.history import History, line
from fshard.tracking.json_lines import read_lines
from fshard.tracking.track import Track

MESH = fs.make_mesh((1,), ("data",))


class Kept:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin(self, step: int, config: Mapping[str, Any]) -> None:
        self.calls.append(("begin", step, dict(config)))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.calls.append((step, dict(scalars)))

    def close(self) -> None:
        self.calls.append("close")


class Bad(Kept):
    """Fails at its second record."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("the server is gone")
        super().log(step, scalars)


class BadThread(Bad):
    """The same, behind a thread."""

    remote = True


def training(mesh: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A step, its start, and its batches."""
    params = {name: torch.linspace(-1, 1, 16).view(4, 4) for name in "ab"}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))])
    opt = fs.optim.adamw(fs.optim.schedules.linear(0.1, 0.0, steps=4))

    def loss_of(params: Any, x: Any) -> Any:
        loss = ((x @ params["a"]) @ params["b"]).square()
        return fs.Mean(loss.sum(), torch.tensor(loss.numel())), {"top": fs.Mean(x.sum(), 1), "rows": x}

    step = fs.make_train_step(loss_of, opt, plan, **options)
    return step, lambda: fs.init_state(plan, opt, params=params), lambda n: torch.full((2, 4), n + 1.0), plan


def recorded(*trackers: Any, steps: int = 4, mesh: Any = MESH, **options: Any) -> list[dict[str, float]]:
    """The numbers of the steps of a run that these trackers record."""
    step, start, batches, _ = training(mesh)
    found = []
    with fs.track([*trackers], step, **options) as track:
        for state, metrics in fs.train_loop(step, start, batches, steps=steps, track=track):
            track(state.step, {"val": {"loss": metrics.loss * 2}})
            found.append(metrics.scalars())
    return found


def test_trackers_get_every_number_in_order() -> None:
    kept = Kept()
    told = recorded(kept, config={"width": 4}, peak=1e9)
    assert kept.calls[0] == ("begin", 1, {"width": 4}) and kept.calls[-1] == "close"
    rows = kept.calls[1:-1]
    assert [step for step, _ in rows] == [1, 1, 2, 2, 3, 3, 4, 4]
    for (_, row), mine in zip(rows[::2], told, strict=True):
        assert {name: row[name] for name in mine} == mine
        assert row["mfu"] == row["flops"] / row["seconds"] / 1e9 and row["memory"] > 1 << 20
    assert "outside" not in rows[0][1] and rows[2][1]["outside"] >= 0
    assert rows[1][1] == {"val/loss": 2 * told[0]["loss"]}
    assert [row["lr"] for _, row in rows[::2]] == pytest.approx([0.1, 0.075, 0.05, 0.025])


def test_numbers_are_plain_and_go_through_json() -> None:
    for row in recorded():
        assert json.loads(json.dumps(row)) == row
        assert row["elements"] == 8 and row["elements_per_second"] == 8 / row["seconds"] and row["aux/top"] > 0
        assert "aux/rows" not in row and row["exposed"] == 0 and row["skipped"] is False


def test_scalars_of_any_tree() -> None:
    numpy = pytest.importorskip("numpy")
    tree = {"a": torch.tensor([[2]]), "b": (1.5, {"c": True}), "n": numpy.float32(0.5), "t": "x", "z": torch.ones(2)}
    assert fs.trackers.scalars(tree) == {"a": 2, "b/0": 1.5, "b/1/c": True, "n": 0.5}
    assert fs.trackers.scalars(torch.tensor(3.0, requires_grad=True)) == {"value": 3.0}


def test_every_nth_step_and_all_else() -> None:
    kept = Kept()
    recorded(kept, every=2)
    assert [call[0] for call in kept.calls[1:-1]] == [1, 2, 2, 3, 4, 4]


def test_elements_can_be_given() -> None:
    kept = Kept()
    recorded(kept, elements=100)
    row = kept.calls[1][1]
    assert row["elements_per_second"] == pytest.approx(100 / row["seconds"])


def test_lines_are_what_was_told_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    told = recorded(fs.trackers.JsonLines(path))
    rows = read_lines(path)
    assert [row["loss"] for row in rows[::2]] == [row["loss"] for row in told]
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the process ended here
    with fs.track([fs.trackers.JsonLines(path)], MESH) as track:
        track(3, {"loss": float("inf")})
    again = read_lines(path)
    assert again[:4] == rows[:4] and again[4:] == [{"step": 3, "loss": float("inf")}]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "a document"}\n{"text": "another"}\n')
    with pytest.warns(UserWarning, match=r"line 1 has no step. Nothing in it was changed"):
        recorded(fs.trackers.JsonLines(path))
    assert path.read_text().count("text") == 2 and len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("kind", [Bad, BadThread])
def test_a_tracker_that_fails_does_not_stop_the_run(kind: Any) -> None:
    kept, bad = Kept(), kind()
    with pytest.warns(UserWarning, match="has failed and gets no more records: ConnectionError: the server") as caught:
        recorded(bad, kept)
    assert len(caught) == 1
    assert len(kept.calls) == 10 and kept.calls[-1] == "close"
    assert [call[0] for call in bad.calls] == ["begin", 1, 1]


def test_records_that_nobody_takes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "WAITING", 1)

    class Stuck(Kept):
        remote = True

        def begin(self, step: int, config: Mapping[str, Any]) -> None:
            __import__("time").sleep(1.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fs.track([Stuck()], MESH, patience=0.01) as track:
            for step in range(5):
                track(step, {"x": 1})
    said = [str(one.message) for one in caught]
    assert sum("records behind" in text for text in said) == 1
    assert sum("did not take all records in time" in text for text in said) == 1


def arrivals(step: Any) -> int:
    """How many control collectives this played rank has come to in its run."""
    thread, control = playing(), step._runner.programs.comms.control
    assert thread is not None
    return int(thread.scheduler.logs[control.role, control.members, 0].counts[control.rank])


def test_rank_0_alone_and_no_exchange() -> None:
    mesh = fs.virtual_mesh((2,), ("data",))

    def run() -> tuple[int, int]:
        mine = fs.make_mesh((2,), ("data",))
        kept, sent = Kept(), 0
        step, start, batches, _ = training(mine)
        with fs.track([kept], step) as track:
            for state, metrics in fs.train_loop(step, start, batches, steps=3):
                before = arrivals(step)
                track(state.step, metrics)
                sent += arrivals(step) - before
        return len(kept.calls), sent

    assert mesh.run(run) == [(5, 0), (0, 0)]


def test_a_train_loop_records_and_closes(tmp_path: Path) -> None:
    step, start, batches, _ = training(MESH)
    path = tmp_path / "run.jsonl"
    with fs.Checkpointer(tmp_path / "run", every=2) as checkpoints:
        options: Any = {"checkpoints": checkpoints, "track": [fs.trackers.JsonLines(path)]}
        for state, _ in fs.train_loop(step, start, batches, steps=9, **options):
            if state.step == 3:  # the process ends here, after step 2 was saved
                break
        assert [row["step"] for row in read_lines(path)] == [1, 2, 3]
        options = {"checkpoints": checkpoints, "track": [fs.trackers.JsonLines(path)]}
        losses = [metrics.loss.item() for _, metrics in fs.train_loop(step, start, batches, steps=5, **options)]
    rows = read_lines(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and [row["loss"] for row in rows[2:]] == losses


def test_a_log_gets_a_line_now_and_then() -> None:
    file = io.StringIO()
    recorded(fs.trackers.Live(4, seconds=1000.0, file=file))
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    assert lines[0].startswith("step 1/4: loss") and lines[1].startswith("step 4/4, ")


def test_the_view_fits_its_terminal() -> None:
    console = pytest.importorskip("rich.console")
    from fshard.tracking.screen import screen

    history = History("loss")
    for step in range(1, 9001):
        row = {"loss": 1 / step, "seconds": 0.2, "exposed": 0.05, "outside": 0.1, "aux/" + "long" * 20: 1.0}
        history.add(step * 0.3, step, row)
    assert len(history.values) < 8192 and history.values[0] == 1.0
    for width in (40, 80, 200):
        file = io.StringIO()
        console.Console(file=file, width=width).print(screen(history, 10_000, width))
        rows = file.getvalue().splitlines()
        assert max(map(len, rows)) == width and len(rows) < 30
        assert "step 9,000 of 10,000" in file.getvalue() and "exposed" in file.getvalue()
    assert line(history, None).startswith("step 9000, 3.333 steps/s")


NEEDED = {
    "TensorBoard": lambda: fs.trackers.TensorBoard("x"),
    "Wandb": lambda: fs.trackers.Wandb("x"),
    "MLflow": lambda: fs.trackers.MLflow("x"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_library_that_is_missing_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=rf'needs .*, which is not installed: pip install "fshard\[{name.lower()}\]"'):
        NEEDED[name]()


def test_live_needs_rich_in_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "find_spec", lambda module: None)
    fs.trackers.Live(file=io.StringIO())
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    with pytest.raises(ImportError, match=r"fshard\[live\]"):
        fs.trackers.Live(file=terminal)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: fs.track("run.jsonl", MESH), "trackers is 'run.jsonl'"),  # type: ignore[arg-type]
        (lambda: fs.track([fs.trackers.JsonLines], MESH), r"which lacks begin\(\), log\(\), close\(\)"),
        (lambda: fs.track(["tensorboard"], MESH), r"trackers\[0\] is 'tensorboard', a str, which lacks"),
        (lambda: fs.track([], "x"), "of is 'x'"),
        (lambda: fs.track([], MESH, every=0), "every=0 must be an int"),
        (lambda: fs.track([], MESH, peak=-1.0), r"peak=-1.0 must be operations a second"),
        (lambda: fs.track([], MESH, peak="measured"), "needs the step or the plan"),
        (lambda: fs.track([], MESH, elements=0), "elements=0 must be a positive number"),
    ],
)
def test_what_cannot_be_tracked(call: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        call()


def test_a_track_ends_itself() -> None:
    kept = Kept()
    track: Track = fs.track([kept], MESH)
    track(1, {"x": 1})
    del track
    assert kept.calls[-1] == "close"
