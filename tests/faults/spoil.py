"""Files and folders that are spoilt: damaged bytes, full and read-only file systems, other writers, clocks."""

import contextlib
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard import tree
from tests.faults.program import start


@dataclass
class Row:
    """One line of the table.

    Attributes:
        name: the fault.
        cases: how often it was tried.
        torn: checkpoints that were visible and not whole.
        restored: how often the last good one was found.
        exact: how often the run went on to the bits of a run without the fault.
        lost: steps lost, at most, beyond those since the last checkpoint.
        problems: what went wrong.
    """

    name: str
    cases: int = 0
    torn: int = 0
    restored: int = 0
    exact: int = 0
    lost: int = 0
    problems: list[str] | None = None

    def fail(self, text: str) -> None:
        """Note a problem."""
        self.problems = [*(self.problems or []), f"{self.name}: {text}"]


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A folder for checkpoints that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fshard-faults-") as at:
        yield str(Path(at, "run"))


def alone() -> tuple[fs.Plan, Any, Any]:
    """The plan of one rank, the optimizer, a state: whatever world saved, one rank reads all of it."""
    return start(fs.make_mesh((1,), ("shard",)))


def saved(at: str) -> list[Path]:
    """Two checkpoints by one rank; the files of the newer one."""
    plan, opt, state = alone()
    step = fs.make_train_step(lambda p, b: sum((leaf * b).square().sum() for leaf in tree.leaves(p)), opt, plan)
    with fs.Checkpointer(at, keep=3) as checkpoints:
        for number in range(2):
            state, _ = step(state, torch.tensor(float(number + 1)))
            checkpoints.save(state)
    return sorted(path for path in Path(at, "step-00000002").rglob("*") if path.is_file())


def damaged(row: Row, damage: Callable[[Path, random.Random], None], each: int) -> None:
    """Damage each file of the newest checkpoint: it is refused, and the one before it is taken where that is asked."""
    plan, opt, _ = alone()
    draw = random.Random(0)
    with folder() as at:
        files = saved(at)
        for path in files:
            whole = path.read_bytes()
            for _ in range(each):
                row.cases += 1
                damage(path, draw)
                with fs.Checkpointer(at) as checkpoints:
                    try:
                        checkpoints.restore(plan, opt)
                        row.fail(f"{path.name} was taken as good")
                    except fs.errors.CheckpointError as error:
                        if "step-00000002" not in str(error):
                            row.fail(f"the error does not say where: {error}")
                    with _quiet():
                        state = checkpoints.restore(plan, opt, fallback=True)
                    row.restored += state.step == 1
                path.write_bytes(whole)
        with fs.Checkpointer(at) as checkpoints:
            row.exact += row.cases * (checkpoints.restore(plan, opt).step == 2)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fs.errors.CheckpointWarning)
        yield


def truncate(path: Path, draw: random.Random) -> None:
    """Cut a file short."""
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def flip(path: Path, draw: random.Random) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def lose(path: Path, draw: random.Random) -> None:
    """Remove a file."""
    path.unlink()


@contextlib.contextmanager
def tmpfs(size: str) -> Iterator[str]:
    """A small file system of its own. Needs root."""
    with tempfile.TemporaryDirectory(prefix="fshard-tmpfs-") as at:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=True, capture_output=True)
        try:
            yield at
        finally:
            subprocess.run(["umount", "-l", at], check=True)


def may_mount() -> bool:
    """Whether file systems can be mounted here."""
    try:
        with tmpfs("64k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def refused(row: Row, at: str, spoil: Callable[[], None], mend: Callable[[], None], says: str) -> None:
    """A save that the file system refuses, an error that says why, and one that works when it is mended."""
    row.cases += 1
    plan, opt, state = alone()
    saved(at)
    step = fs.make_train_step(lambda p, b: sum((leaf * b).square().sum() for leaf in tree.leaves(p)), opt, plan)
    with fs.Checkpointer(at, keep=3) as checkpoints:
        state = checkpoints.restore(plan, opt)
        state, _ = step(state, torch.tensor(3.0))
        spoil()
        try:
            checkpoints.save(state)
            return row.fail("the save was not refused")
        except fs.errors.CheckpointError as error:
            if says not in str(error):
                row.fail(f"the error does not say {says!r}: {error}")
        row.restored += checkpoints.restore(plan, opt).step == 2 and readable_here(checkpoints, plan, opt) == [1, 2]
        mend()
        checkpoints.save(state)
        row.exact += readable_here(checkpoints, plan, opt) == [1, 2, 3]


def readable_here(checkpoints: fs.Checkpointer, plan: fs.Plan, opt: Any) -> list[int]:
    """The steps that can be read."""
    return [step for step in checkpoints.steps() if checkpoints.restore(plan, opt, step).step == step]


def full_disk(row: Row) -> None:
    """A disk that is full in the middle of a save, at several fillings."""
    with tmpfs("256k") as at:
        for left in (0, 4096):
            run_folder, ballast = str(Path(at, f"run{left}")), Path(at, "ballast")

            def fill(left: int = left, ballast: Path = ballast) -> None:
                with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 4096)
                os.truncate(ballast, max(0, ballast.stat().st_size // 4096 * 4096 - left))

            refused(row, run_folder, fill, ballast.unlink, "No space left")
            shutil.rmtree(run_folder)


def read_only(row: Row) -> None:
    """A file system that has become read-only."""
    with tmpfs("4m") as at:

        def remount(how: str) -> None:
            subprocess.run(["mount", "-o", f"remount,{how}", at], check=True, capture_output=True)

        # A lock that is open for writing keeps a file system from becoming read-only, so the Checkpointer has none yet.
        refused(row, str(Path(at, "run")), lambda: remount("ro"), lambda: remount("rw"), "Read-only")


def two_jobs(row: Row) -> None:
    """A second job that writes to the folder of one that runs."""
    row.cases += 1
    plan, opt, state = alone()
    with folder() as at:
        saved(at)
        with fs.Checkpointer(at, keep=3) as first, fs.Checkpointer(at, keep=1) as second:
            state = first.restore(plan, opt)
            first.save(state, overwrite=True)
            try:
                second.save(second.restore(plan, opt, 1), overwrite=True)
                row.fail("both wrote")
            except fs.errors.CheckpointError as error:
                if "another" not in str(error) and "lock" not in str(error):
                    row.fail(f"the error does not say why: {error}")
            row.restored += second.restore(plan, opt).step == 2
            first.save(state, overwrite=True)
            row.exact += readable_here(first, plan, opt) == [1, 2]


def clock_back(row: Row) -> None:
    """Folders whose times say the opposite of their steps, as after a clock that was set back."""
    row.cases += 1
    plan, opt, _ = alone()
    with folder() as at:
        saved(at)
        now = time.time()
        for step, shift in ((1, 86400.0), (2, -86400.0)):
            for path in [*Path(at, f"step-{step:08d}").rglob("*"), Path(at, f"step-{step:08d}")]:
                os.utime(path, (now + shift, now + shift))
        with fs.Checkpointer(at, keep=2) as checkpoints:
            state = checkpoints.restore(plan, opt)
            row.restored += state.step == 2 and checkpoints.latest() == 2
            step = fs.make_train_step(lambda p, b: sum((x * b).square().sum() for x in tree.leaves(p)), opt, plan)
            state, _ = step(state, torch.tensor(3.0))
            checkpoints.save(state)
            row.exact += checkpoints.steps() == [2, 3]  # the oldest by step has gone


def files(each: int) -> list[Row]:
    """What can happen to files and folders."""
    rows = []
    for name, damage, count in (
        ("truncated file", truncate, each),
        ("bit flip", flip, each),
        ("missing file", lose, 1),
    ):
        rows.append(Row(name))
        damaged(rows[-1], damage, count)
    for name, fault in (("two jobs, one folder", two_jobs), ("clock set back", clock_back)):
        rows.append(Row(name))
        fault(rows[-1])
    for name, fault in (("full disk", full_disk), ("read-only folder", read_only)):
        rows.append(Row(name if may_mount() else f"{name} (skipped: it takes root to mount)"))
        if may_mount():
            fault(rows[-1])
    return rows
