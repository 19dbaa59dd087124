"""The fault matrix: what is done to a run, and that no fault costs more than the steps since the last checkpoint.

``python -m tests.faults.matrix`` runs all of it and prints a table of counts; ``--write docs/reliability.md`` puts the
table there, between its marks.
"""

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard import tree
from tests.faults.job import TIMEOUT, End, Kill, Run, run
from tests.faults.program import differing, start

ACTIONS, ENGINE, FOLDER = "runtime/actions.py", "runtime/engine.py", "checkpoint/folder.py"

PHASES: dict[str, tuple[str, str, int]] = {
    "agree": ("runtime/attempt.py", "agree", 1),
    "forward": (ENGINE, "call", 2),
    "gather": (ACTIONS, "_gather", 2),
    "wait for a gather": (ACTIONS, "_wait", 2),
    "backward": (ENGINE, "enter_backward", 2),
    "reduce": (ACTIONS, "_reduce", 1),
    "collect": (ACTIONS, "_collect", 1),
    "update": ("runtime/update.py", "apply", 1),
    "vote": ("runtime/commit.py", "vote", 1),
    "save: it begins": ("checkpoint/checkpointer.py", "_begin", 1),
    "save: write": ("checkpoint/write.py", "write_files", 1),
    "save: first fsync": ("", "fsync", 1),
    "save: second fsync": ("", "fsync", 2),
    "save: ranks meet": ("checkpoint/meeting.py", "together", 2),
}
"""Where each rank is killed: the end of a source file's name, a function, and at which of its calls."""

FIRST_RANK: dict[str, tuple[str, str, int]] = {
    "save: temporary folder": (FOLDER, "begin", 1),
    "save: commit": (FOLDER, "commit", 1),
    "save: rename": ("", "rename", 1),
    "save: after the rename": (FOLDER, "sync", 2),
    "retention": (FOLDER, "retain", 1),
    "retention: rename": ("", "rename", 2),
    "retention: remove": (FOLDER, "remove", 1),
    "retention: in the middle": ("", "unlink", 1),
}
"""What the first rank does alone."""


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


class Bench:
    """What cases share: what a run without faults comes to, for each number of ranks."""

    def __init__(self) -> None:
        self.good: dict[int, list[End]] = {}

    def undisturbed(self, world: int) -> list[End]:
        """How each rank ends where nothing happens."""
        if world not in self.good:
            with folder() as at:
                ends = run(Run(at, world))
                assert not any(end.error for end in ends), ends
                self.good[world] = ends
        return self.good[world]


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """A folder for checkpoints that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="fshard-faults-") as at:
        yield str(Path(at, "run"))


def alone() -> tuple[fs.Plan, Any, Any]:
    """The plan of one rank, the optimizer, a state: whatever world saved, one rank reads all of it."""
    return start(fs.make_mesh((1,), ("shard",)))


def readable(at: str, row: Row) -> list[int]:
    """The steps that are visible; each is read, and every byte of it verified."""
    plan, opt, _ = alone()
    with fs.Checkpointer(at) as checkpoints:
        steps = checkpoints.steps()
        for step in steps:
            try:
                checkpoints.restore(plan, opt, step)
            except fs.errors.ShardError as error:
                row.torn += 1
                row.fail(f"step {step} is torn: {error}")
    return steps


def killed(bench: Bench, row: Row, kill: Kill, **options: Any) -> None:
    """Kill a rank; look at what is left; go on."""
    row.cases += 1
    told = f"rank {kill.rank} at {kill.function}"
    with folder() as at:
        job = Run(at, kill=kill, **options)
        ends = run(job)
        if ends[kill.rank].code != -9:
            return row.fail(f"{told} was not reached: {ends[kill.rank].code} {ends[kill.rank].error}")
        for rank, end in enumerate(ends):
            if rank != kill.rank and (not end.error or end.seconds > TIMEOUT / 2):
                row.fail(f"{told}: rank {rank} ended after {end.seconds:.1f} s: {end.error or 'no error'}")
            elif rank != kill.rank and f"rank {kill.rank}" not in end.error:
                row.fail(f"{told}: the error of rank {rank} names another: {end.error}")
        steps = readable(at, row)
        made = max((max(end.losses or {0: 0.0}) for end in ends), default=0)
        row.restored += bool(steps)
        row.lost = max(row.lost, made - max(steps, default=0) - (job.every - 1) - job.async_)
        goes_on(bench, row, job, told)


def goes_on(bench: Bench, row: Row, job: Run, told: str) -> None:
    """Run the job again, without the fault, to the bits of a run that had none."""
    ends = run(replace(job, kill=None))
    want = bench.undisturbed(job.world)
    wrong = [end.error for end in ends if end.error]
    for end, good in zip(ends, want, strict=True):
        wrong += differing(good.whole or {}, end.whole or {})
        wrong += [f"loss {n}" for n, loss in (end.losses or {}).items() if loss != (good.losses or {})[n]]
    row.exact += not wrong
    if wrong:
        row.fail(f"{told}: the run did not go on as without the fault: {wrong[:4]}")
    left = [name for name in os.listdir(job.folder) if ".tmp-" in name or ".trash-" in name]
    if left:
        row.fail(f"{told}: {left} were left behind")


def kills(bench: Bench, world: int, quick: bool) -> list[Row]:
    """Each rank at each phase."""
    rows = []
    for number, (phase, (file, function, count)) in enumerate((PHASES | FIRST_RANK).items()):
        row = Row(f"kill -9: {phase}")
        ranks = [0] if phase in FIRST_RANK else [number % world] if quick else list(range(world))
        for rank in ranks:
            killed(bench, row, Kill(rank, file, function, count), world=world)
        rows.append(row)
    return rows


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


def table(rows: list[Row]) -> str:
    """The table, in Markdown."""
    head = "| fault | cases | torn checkpoints visible | last good one restored | went on, bit for bit | steps lost |\n"
    lines = [head + "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(f"| {row.name} | {row.cases} | {row.torn} | {row.restored} | {row.exact} | {row.lost} |")
    total = [sum(getattr(row, name) for row in rows) for name in ("cases", "torn", "restored", "exact")]
    lines.append(f"| **all** | **{total[0]}** | **{total[1]}** | **{total[2]}** | **{total[3]}** | |")
    return "\n".join(lines)


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="put the table into this page, between its marks")
    parser.add_argument("--ranks", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench()
    rows = kills(bench, given.ranks, quick=False)
    saving = {name: at for name, at in (PHASES | FIRST_RANK).items() if name.startswith(("save", "retention"))}
    row = Row("kill -9: an asynchronous save, at any of these")
    for file, function, count in saving.values():
        killed(bench, row, Kill(0, file, function, count), world=2, async_=True)
    rows.append(row)
    row = Row("kill -9: over gloo, at any phase of a step")
    for name, (file, function, count) in PHASES.items():
        if not name.startswith("save"):
            killed(bench, row, Kill(1, file, function, count), world=2, gloo=True)
    rows += [row, *files(each=20)]
    text = table(rows)
    print(text)
    problems = [problem for row in rows for problem in row.problems or []]
    print(*problems, sep="\n", file=sys.stderr)
    if given.write is not None and not problems:
        page = given.write.read_text()
        before, _, rest = page.partition("<!-- matrix -->\n")
        _, _, after = rest.partition("<!-- end of matrix -->")
        given.write.write_text(f"{before}<!-- matrix -->\n{text}\n<!-- end of matrix -->{after}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
