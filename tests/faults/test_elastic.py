"""Runs that outlive their processes: torchrun starts them again, SIGTERM stops them, other numbers of ranks go on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from tests.faults.program import Fault, batch, make_loss, start
from tests.shared.bad import attempt
from tests.shared.workers import Pools

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def torchrun(
    folder: Path, steps: int, fault: str, ranks: int, restarts: int, script: str = "tests.faults.elastic_job"
) -> tuple[int, str]:
    """Run the job to its end; returns torchrun's exit code and what it wrote. No process is left."""
    options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--monitor-interval=0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*command, str(folder), str(steps), fault],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=120.0)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    return job.returncode, output.decode(errors="replace")


def report(folder: Path, rank: int, again: int) -> dict[str, Any]:
    """What a rank of an attempt wrote."""
    return dict(json.loads((folder / f"rank{rank}.{again}.json").read_text()))


def undisturbed(steps: int) -> tuple[dict[str, float], dict[str, Any]]:
    """On a rank: the losses and parameters of a run without faults."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan, opt, state = start(mesh)
        step, losses = fs.make_train_step(make_loss(Fault()), opt, plan), {}
        for number in range(steps):
            state, metrics = step(state, batch(number, mesh.rank))
            losses[str(state.step)] = metrics.loss.item()
        return losses, {path: leaf.tolist() for path, leaf in tree.paths(fs.unshard(state.params, plan))}


@pytest.mark.slow
def test_torchrun_starts_a_run_again_which_resumes(pool: Pools, tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, 8, "SIGKILL", 2, 1)
    assert code == 0, output
    losses, whole = pool(2).run(undisturbed, 8)[0]
    for rank in range(2):
        second = report(tmp_path, rank, 1)
        assert list(second["made"]) == ["5", "6", "7", "8"]  # the last checkpoint was of step 4
        assert second["made"] == {number: losses[number] for number in second["made"]}
        assert second["whole"] == whole


@pytest.mark.slow
def test_an_exception_too(pool: Pools, tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, 8, "raises", 2, 1)
    assert code == 0, output
    assert report(tmp_path, 0, 1)["whole"] == pool(2).run(undisturbed, 8)[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2)])
def test_more_or_fewer_ranks_go_on(tmp_path: Path, before: int, after: int) -> None:
    code, output = torchrun(tmp_path, 4, "none", before, 0)
    assert code == 0, output
    code, output = torchrun(tmp_path, 8, "none", after, 0)
    assert code == 0, output
    for rank in range(after):
        second = report(tmp_path, rank, 0)
        assert second["world"] == after
        assert list(second["made"]) == ["5", "6", "7", "8"]


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_at_one_step_and_saves(tmp_path: Path) -> None:
    code, output = torchrun(tmp_path, 8, "SIGTERM", 2, 0)
    assert code != 0, output
    first = [report(tmp_path, rank, 0) for rank in range(2)]
    assert [list(end["made"])[-1] for end in first] == ["6", "6"]
    assert fs.Checkpointer(tmp_path / "run").latest() == 6


def stopped(folder: str, which: int) -> tuple[list[int], str, list[int], bool]:
    """On a rank: a loop, one rank of which gets SIGTERM in its third step; then the loop again."""
    before = signal.getsignal(signal.SIGTERM)
    with fs.make_mesh((-1,), ("shard",)) as mesh, fs.Checkpointer(folder) as checkpoints:
        plan, opt, _ = start(mesh)
        step = fs.make_train_step(make_loss(Fault()), opt, plan)

        def batches(number: int) -> Any:
            if number == 2 and mesh.rank == which:
                os.kill(os.getpid(), signal.SIGTERM)
            return batch(number, mesh.rank)

        made: list[int] = []
        ended = ""
        try:
            for state, _ in fs.train_loop(step, lambda: start(mesh)[2], batches, steps=6, checkpoints=checkpoints):
                made.append(state.step)
        except fs.Preempted as error:
            ended = f"{error.code}: {error}"
        saved = checkpoints.steps()
        more = fs.train_loop(
            step, lambda: start(mesh)[2], lambda n: batch(n, mesh.rank), steps=6, checkpoints=checkpoints
        )
        made += [state.step for state, _ in more]
        return made, ended, saved, signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("which", [0, 1])
def test_a_signal_to_one_rank_stops_all_ranks_at_the_same_step(pool: Pools, tmp_path: Path, which: int) -> None:
    want = [1, 2, 3, 4, 5, 6], "143: SIGTERM: stopped after step 3", [3], True
    assert pool(2).run(stopped, str(tmp_path), which) == [want] * 2


class Loader:
    """A data loader that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while self.at < 8:
            self.at += 1
            yield batch(self.at - 1, 0)

    def state_dict(self) -> dict[str, int]:
        """Its position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


@pytest.mark.parametrize("kind", ["function", "list", "loader"])
def test_batches_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    plan, opt, state = start(fs.make_mesh((1,), ("shard",)))
    step = fs.make_train_step(make_loss(Fault()), opt, plan)
    losses: list[float] = []
    for end in (3, 8):
        sources: dict[str, Any] = {
            "function": lambda number: batch(number, 0),
            "list": [batch(number, 0) for number in range(8)],
            "loader": Loader(),
        }
        with fs.Checkpointer(tmp_path) as checkpoints:
            loop = fs.train_loop(step, lambda: start(plan.mesh)[2], sources[kind], steps=end, checkpoints=checkpoints)
            losses += [metrics.loss.item() for _, metrics in loop]
    for number in range(8):
        state, metrics = step(state, batch(number, 0))
        assert losses[number] == metrics.loss.item()


def test_arguments_of_a_loop() -> None:
    plan, opt, _ = start(fs.make_mesh((1,), ("shard",)))
    step = fs.make_train_step(make_loss(Fault()), opt, plan)
    for arguments, more, says in (
        ((None, list, list), {"steps": 1}, "train step"),
        ((step, list, 3), {"steps": 1}, "int"),
        ((step, list, list), {"steps": -1}, "steps=-1"),
    ):
        raised = attempt(lambda: fs.train_loop(*arguments, **more))  # type: ignore[arg-type]  # noqa: B023
        assert raised is not None and "PlanError" in raised.kinds and says in raised.text


def test_signals_are_taken_by_the_main_thread_alone_and_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with fs.Preemption([signal.SIGUSR1]) as preemption:
        assert preemption.asked is None
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.0)
        assert preemption.asked == signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) is before
    seen: list[Any] = []

    def elsewhere() -> None:
        with fs.Preemption([signal.SIGUSR1]):
            seen.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_generator_that_is_left_gives_signals_back(tmp_path: Path) -> None:
    plan, opt, _ = start(fs.make_mesh((1,), ("shard",)))
    step = fs.make_train_step(make_loss(Fault()), opt, plan)
    before = signal.getsignal(signal.SIGTERM)
    loop = fs.train_loop(step, lambda: start(plan.mesh)[2], lambda number: batch(number, 0), steps=3)
    state, _ = next(loop)
    assert state.step == 1 and signal.getsignal(signal.SIGTERM) is not before
    loop.close()  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGTERM) is before
    assert torch.isfinite(fs.unshard(state.params, plan)["last"]["w"]).all()
