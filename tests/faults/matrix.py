"""The fault matrix: what is done to a run, and that no fault costs more than the steps since the last checkpoint.

``python -m tests.faults.matrix`` runs all of it and prints a table of counts; ``--write tests/faults/README.md``
puts the table there, between its marks.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from tests.faults import lives, stuck
from tests.faults.job import TIMEOUT, End, Kill, Run, run
from tests.faults.program import differing
from tests.faults.spoil import Row, alone, files, folder

ACTIONS, ENGINE, FOLDER = "runtime/execution/actions.py", "runtime/engine/engine.py", "checkpoint/folder.py"

PHASES: dict[str, tuple[str, str, int]] = {
    "handshake": ("runtime/steps/handshake.py", "agree", 1),
    "forward": (ENGINE, "call", 2),
    "gather": (ACTIONS, "_gather", 2),
    "wait for a gather": (ACTIONS, "_end", 2),
    "backward": (ENGINE, "enter_backward", 2),
    "reduce": (ACTIONS, "_reduce", 1),
    "collect": (ACTIONS, "_reduced", 1),
    "update": ("runtime/execution/pending_update.py", "apply", 1),
    "consensus": ("runtime/steps/consensus.py", "exchange_row", 1),
    "save: it begins": ("checkpoint/checkpointer.py", "_check", 1),
    "save: write": ("checkpoint/write.py", "write_files", 1),
    "save: first fsync": ("", "fsync", 1),
    "save: second fsync": ("", "fsync", 2),
    "save: ranks meet": ("checkpoint/checkpointer.py", "_prepare", 1),
}
"""Where each rank is killed: the end of a source file's name, a function, and at which of its calls."""

FIRST_RANK: dict[str, tuple[str, str, int]] = {
    "save: temporary folder": (FOLDER, "begin", 1),
    "save: commit": (FOLDER, "commit", 1),
    "save: rename": ("", "rename", 1),
    "save: after the rename": (FOLDER, "sync", 2),
    "retention": (FOLDER, "remove_old", 1),
    "retention: rename": ("", "rename", 2),
    "retention: remove": (FOLDER, "remove", 1),
    "retention: in the middle": ("", "unlink", 1),
}
"""What the first rank does alone."""


class Bench:
    """What cases share: what a run without faults comes to, for each number of ranks."""

    def __init__(self) -> None:
        self.good: dict[tuple[int, bool], list[End]] = {}

    def undisturbed(self, world: int, gloo: bool) -> list[End]:
        """How each rank ends where nothing happens. (gloo's ring adds in an order of its own.)"""
        if (world, gloo) not in self.good:
            with folder() as at:
                ends = run(Run(at, world, gloo=gloo))
                assert not any(end.error for end in ends), ends
                self.good[world, gloo] = ends
        return self.good[world, gloo]


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
    want = bench.undisturbed(job.world, job.gloo)
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
            killed(bench, row, Kill(2, file, function, count), world=3, gloo=True)
    rows.append(row)
    row = Row("kill -9: a rank whose forked child lives on")
    for name in ("forward", "backward", "consensus", "save: write"):
        for gloo in (False, True):
            killed(bench, row, Kill(1, *PHASES[name], child=True), world=3, gloo=gloo)
    rows += [row, *files(each=20)]
    text = table(rows)
    print(text)
    waits = [*stuck.rows(), *lives.rows()]
    print(stuck.table(waits))
    problems = [problem for row in [*rows, *waits] for problem in row.problems or []]
    print(*problems, sep="\n", file=sys.stderr)
    if given.write is not None and not problems:
        page = stuck.written(given.write.read_text(), "matrix", text)
        given.write.write_text(stuck.written(page, "waits", stuck.table(waits)))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
