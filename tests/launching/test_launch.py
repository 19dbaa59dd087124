"""``fs.launch``: functions of scripts and cells on real ranks, and what is left of them when something goes wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.errors import LaunchError, PlanError
from fshard.launching.caller import _results
from fshard.launching.job import STATUS, log_of, packed, read_outcome, unpacked, write_error, write_result

processes = pytest.mark.processes
OWNER = f"FSHARD_TEST={os.getpid()}".encode()


@pytest.fixture(autouse=True)
def owned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks the processes that this process starts, since tests run side by side."""
    monkeypatch.setenv(*OWNER.decode().split("="))


def left() -> dict[int, int]:
    """The processes of launches that are alive, and their parents."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or OWNER not in (folder / "environ").read_bytes():
                continue
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"fshard.launching.nursery" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = parent
        except OSError:  # it ended meanwhile
            continue
    return found


def trained(steps: int) -> Any:
    """On a rank: the loss, whole parameters, and the rank."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        model = fs.split(torch.nn.Linear(4, 2))
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
        opt = fs.optim.sgd(0.1)
        state = fs.init_state(plan, opt, seed=0)
        step = fs.make_train_step(lambda params, x: model.apply(params, x).square().mean(), opt, plan)
        for _ in range(steps):
            state, metrics = step(state, plan.local_batch(torch.ones(4, 4)))
        print(f"rank {mesh.rank} has loss {metrics.loss:.4f}")
        return metrics.loss.item(), fs.unshard(state.params, plan)["weight"], mesh.rank


@processes
@pytest.mark.long
def test_results_output_and_the_numbers_of_played_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    here = fs.virtual_mesh((2,), ("any",)).run(trained, 3)
    capfd.readouterr()
    results = fs.launch(trained, 3, ranks=2, all_ranks=True)
    assert [(loss, rank) for loss, _, rank in results] == [(loss, rank) for loss, _, rank in here]
    assert all(torch.equal(there[1], mine[1]) for there, mine in zip(results, here, strict=True))
    assert capfd.readouterr().out == f"rank 0 has loss {here[0][0]:.4f}\n"
    assert not left()


def failing(how: str) -> Any:
    """On a rank: fails in some way on rank 1, while rank 0 waits for it."""
    mesh = fs.make_mesh((-1,), ("shard",))
    if mesh.rank == 1:
        print("the last words")
        if how == "raises":
            raise KeyError("missing")
        os.kill(os.getpid(), signal.SIGKILL)
    return fs.collectives.psum(torch.ones(1), "shard", mesh=mesh)


@processes
@pytest.mark.slow
def test_the_error_of_a_rank_is_raised_once_with_its_own_lines() -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        fs.launch(failing, "raises", ranks=2)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1:") and 'raise KeyError("missing")' in note and "nursery" not in note
    assert not left()


@processes
@pytest.mark.slow
def test_a_rank_that_dies_is_named_with_its_last_words() -> None:
    with pytest.raises(LaunchError, match=r"(?s)rank 1 was killed by SIGKILL.*the last words"):
        fs.launch(failing, "dies", ranks=2)
    assert not left()


def test_the_last_words_of_a_rank_are_read_from_its_log(tmp_path: Path) -> None:
    """What the caller makes of the folder that such a launch leaves."""
    write_result(tmp_path, 0, 3)
    Path(log_of(str(tmp_path), 1)).write_text("the last words\n")
    (tmp_path / STATUS).write_text(json.dumps({0: 0, 1: -signal.SIGKILL}))
    with pytest.raises(LaunchError, match=r"(?s)rank 1 was killed by SIGKILL.*the last words"):
        _results(tmp_path, 2)
    write_error(tmp_path, 1, KeyError("missing"))
    with pytest.raises(KeyError, match="missing") as raised:
        _results(tmp_path, 2)
    assert raised.value.__notes__ == ["on rank 1:"]  # it was never raised, so it has no lines
    write_result(tmp_path, 1, 4)
    assert _results(tmp_path, 2) == [3, 4]


def endless() -> None:
    """On a rank: starts another process, rank 0 says that it runs, and none of them ever ends."""
    if os.fork():
        print("running", flush=True)
    while True:
        time.sleep(0.01)


@processes
@pytest.mark.long
def test_an_interrupt_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, int] = {}

    class Out:
        def write(self, text: str) -> None:
            if "running" in text:
                seen.update(left())
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Out())
    with pytest.raises(KeyboardInterrupt):
        fs.launch(endless, ranks=2)
    assert not left()
    (nursery,) = [pid for pid, parent in seen.items() if parent == os.getpid()]
    ranks = [pid for pid, parent in seen.items() if parent == nursery]
    assert len(ranks) == 2 and len(seen) >= 4  # rank 1 may not have started its own by then
    assert not any(Path(f"/proc/{pid}").exists() for pid in (nursery, *ranks))  # nor are they there as zombies


@processes
@pytest.mark.slow
def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    code = "import fshard as fs\nfrom tests.launching.test_launch import endless\nfs.launch(endless, ranks=2)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None and job.stdout.readline() == "running\n"
        assert left()
        job.kill()
    until = time.monotonic() + 20
    while left() and time.monotonic() < until:
        time.sleep(0.1)
    assert not left()


@processes
@pytest.mark.slow
def test_a_script_without_a_guard_and_functions_of_main(tmp_path: Path) -> None:
    """Functions of ``__main__`` go by value, so ranks do not run the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import fshard as fs, torch
            scale = 10
            class Holder:
                value = 2
            def cell(x):
                mesh = fs.make_mesh((-1,), ("shard",))
                return fs.collectives.psum(torch.tensor(mesh.rank + x), "shard", mesh=mesh) * scale * Holder.value
            print("once", fs.launch(cell, 1, ranks=2).item())
        """)
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == ("once 60\n", 0), run.stderr


def closing(how: str) -> int:
    """On a rank: its output is gone when it ends."""
    getattr(sys.stdout, how)()
    if how == "detach":
        raise KeyError("mine")
    return 1


@processes
@pytest.mark.slow
def test_functions_that_close_their_output_say_what_became_of_them() -> None:
    assert fs.launch(closing, "close", ranks=2, all_ranks=True) == [1, 1]
    with pytest.raises(KeyError, match="mine"):
        fs.launch(closing, "detach", ranks=2)


@processes
@pytest.mark.slow
def test_a_caller_with_many_open_files() -> None:
    """``select`` takes no descriptors from 1,024 on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert fs.launch(os.getpid, ranks=1) != os.getpid()


def test_places_where_nothing_can_be_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="called by a rank of a virtual mesh"):
        fs.virtual_mesh((2,), ("a",)).run(lambda: fs.launch(endless, ranks=2))
    for name, what in (("FSHARD_LAUNCHED", "rank 3 of an fs.launch"), ("TORCHELASTIC_RUN_ID", "rank 3 of torchrun")):
        with monkeypatch.context() as context:
            context.setenv(name, "1")
            context.setenv("RANK", "3")
            with pytest.raises(PlanError, match=f"called by {what}, and ranks start no ranks: call the function"):
                fs.launch(endless, ranks=2)
    with pytest.raises(PlanError, match="give the number of ranks"):
        fs.launch(endless, ranks=0)
    with pytest.raises(PlanError, match="fn is 3, an int: give a function"):
        fs.launch(3, ranks=2)  # type: ignore[arg-type]


def test_what_cannot_be_sent_is_named() -> None:
    lock, fine = threading.Lock(), 3

    def uses(x: Any) -> Any:
        return lock, fine

    with pytest.raises(PlanError, match=r"(?s)uses cannot be sent.*  lock, a lock: .*inside of the function") as caught:
        packed(uses, (1,), {})
    assert "fine" not in str(caught.value)
    plan = fs.make_plan({"w": torch.ones(2)}, fs.abstract_mesh((1,), ("shard",)), [(".*", fs.P())])
    step = fs.make_train_step(lambda params, x: params["w"].sum(), fs.optim.sgd(0.1), plan)
    with pytest.raises(PlanError, match="argument 0, a TrainStep: .* make it again from its function"):
        packed(uses, (step,), {})


def test_outcomes(tmp_path: Path) -> None:
    fn, args, kwargs = unpacked(packed(lambda x, y: x + y, (1,), {"y": 2}))
    assert fn(*args, **kwargs) == 3
    write_result(tmp_path, 0, {"a": 1})
    assert read_outcome(tmp_path, 0) == ("result", {"a": 1}) and read_outcome(tmp_path, 1) is None
    with pytest.raises(PlanError, match=r"the result of rank 1, a generator, cannot be sent back: .*fs.unshard"):
        write_result(tmp_path, 1, (x for x in "a"))

    class OddError(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    write_error(tmp_path, 1, OddError(1, 2))  # it cannot be made again from its message
    kind, error, text = read_outcome(tmp_path, 1) or ()
    assert (kind, text, str(error)) == ("error", "on rank 1:", "OddError: 1 and 2") and isinstance(error, LaunchError)
