"""The state that a train loop saves, keeps and records beside its steps: a resumed run is the run that was not cut."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import CheckpointError, CheckpointWarning, PlanError
from fshard.tracking.json_lines import read_lines

OPT = fs.optim.adamw(0.01)


class Tokens:
    """State as classes of PyTorch have it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"tokens": 0, "losses": []}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class KilledError(Exception):
    """Ends a run in its loop."""


def parts(mesh: Any) -> tuple[Any, Any, Any]:
    plan = fs.make_plan({"w": torch.ones(4)}, mesh, [("w", fs.fsdp("data"))], batch=fs.P("data"))

    def loss(params: Any, x: Any) -> Any:
        return fs.Mean((x @ params["w"]).square().sum(), x.shape[0])

    return plan, fs.make_train_step(loss, OPT, plan), fs.make_eval_step(loss, plan)


def run(folder: Path, mesh: Any, end: int, extra: Any, kill: int | None = None) -> Any:
    """Train in a folder. The body counts tokens, and may end the run in the middle of a step's body."""
    plan, step, look = parts(mesh)
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    mine = plan.local_batch(rows)
    kept = extra.state if isinstance(extra, Tokens) else extra

    def evaluate(state: Any) -> Any:
        return {"val": {"loss": look(state, mine)}}

    options: dict[str, Any] = {"evaluate": evaluate, "evaluate_every": 2}
    with fs.Checkpointer(folder / "run", every=2, keep=1, keep_every=4) as checkpoints:
        options |= {"checkpoints": checkpoints, "track": [fs.trackers.JsonLines(folder / "run.jsonl")]}
        start = lambda: fs.init_state(plan, OPT, params={"w": torch.ones(4)})  # noqa: E731
        for state, metrics in fs.train_loop(step, start, lambda n: mine * n, steps=end, extra=extra, **options):
            kept = extra.state if isinstance(extra, Tokens) else extra
            kept["tokens"] += int(metrics.elements)
            if state.step == kill:
                raise KilledError
            kept["losses"] = [*kept["losses"], metrics.loss.item()]
        return fs.unshard(state.params, plan)["w"], kept, checkpoints.steps()


@pytest.mark.parametrize("kind", [Tokens, lambda: {"tokens": 0, "losses": []}], ids=["object", "dict"])
def test_a_killed_run_resumes_with_the_users_state(tmp_path: Path, kind: Any) -> None:
    mesh = fs.make_mesh((1,), ("data",))
    for name in ("plain", "cut"):
        (tmp_path / name).mkdir()
    w, kept, steps = run(tmp_path / "plain", mesh, 9, kind())
    assert kept["tokens"] == 9 * 12 and len(kept["losses"]) == 9
    assert steps == [4, 8, 9]  # one, and multiples of four
    for kill in (3, 4, 6, 7):  # also where a checkpoint is due after the body
        with pytest.raises(KilledError):
            run(tmp_path / "cut", mesh, 9, kind(), kill)
    again, same, steps = run(tmp_path / "cut", mesh, 9, kind())
    assert torch.equal(w, again) and same == kept and steps == [4, 8, 9]
    ours, theirs = (read_lines(tmp_path / name / "run.jsonl") for name in ("plain", "cut"))
    for row, other in zip(ours, theirs, strict=True):
        assert (row["step"], row["loss"], row.get("val/loss")) == (other["step"], other["loss"], other.get("val/loss"))
        assert ("val/loss" in row) == (row["step"] in (2, 4, 6, 8, 9)) and "seconds" in row


def test_saves_by_time(tmp_path: Path) -> None:
    plan, step, _ = parts(fs.virtual_mesh((2,), ("data",)))

    def ranks() -> list[int]:
        mine = plan.local_batch(torch.ones(4, 4))
        state = fs.init_state(plan, OPT, params={"w": torch.ones(4)})
        saved = []
        with fs.Checkpointer(tmp_path / "run", every="10min") as checkpoints:
            assert not checkpoints.due(state)
            for n in range(5):
                state, _ = step(state, mine)
                # Clocks of ranks differ: what rank 0 says holds.
                checkpoints._interval.since -= 400 if plan.mesh.here.rank == 0 else 3000 * (n == 0)
                if checkpoints.due(state):
                    checkpoints.save(state)
                    saved.append(state.step)
        return saved

    assert plan.mesh.run(ranks) == [[2, 4]] * 2  # type: ignore[attr-defined]


def test_state_of_the_user_that_only_one_side_has(tmp_path: Path) -> None:
    plan, step, _ = parts(fs.make_mesh((1,), ("data",)))
    start = lambda: fs.init_state(plan, OPT, params={"w": torch.ones(4)})  # noqa: E731

    def go(end: int, extra: Any) -> None:
        with fs.Checkpointer(tmp_path, keep=9) as checkpoints:
            options: dict[str, Any] = {"steps": end, "checkpoints": checkpoints, "extra": extra}
            for _ in fs.train_loop(step, start, lambda n: torch.ones(2, 4), **options):
                pass

    go(1, None)
    with pytest.warns(CheckpointWarning, match="saved without extra=: it begins as it was given"):
        go(2, {"tokens": 3})
    with pytest.warns(CheckpointWarning, match="the checkpoint holds extra state, and train_loop was given none"):
        go(3, None)
    with pytest.raises(CheckpointError, match="cannot be written as JSON"), pytest.warns(CheckpointWarning):
        go(4, {"tokens": torch.ones(1)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra": 3}, r"extra=. is 3, an int: give a dict of JSON values"),
        ({"evaluate": 3, "track": []}, r"evaluate=. is 3, an int: give a function"),
        ({"evaluate": print}, "give track= as well"),
        ({"evaluate": print, "track": [], "evaluate_every": 0}, "evaluate_every=0.: give an int >= 1"),
        ({"evaluate_every": 2}, "give evaluate= as well"),
    ],
)
def test_what_a_loop_cannot_take(options: Any, words: str) -> None:
    _, step, _ = parts(fs.make_mesh((1,), ("data",)))
    with pytest.raises(PlanError, match=words):
        fs.train_loop(step, dict, [], steps=1, **options)


@pytest.mark.parametrize("every", ["10", "0s", "1 week", "-1s", 0, True, 1.5])
def test_what_is_no_time(every: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="every="):
        fs.Checkpointer(tmp_path, every=every)
