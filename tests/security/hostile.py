"""Load hostile files, each within bounds of memory and time: ``python -m tests.security.hostile --cases 10000``.

A child process, whose data may grow by 512 MB and no more, loads one after the other and says what came of it. Each
must be refused by an error of the library with its path, or be harmless and give what was asked for. A child that says
nothing for a while is ended, and that counts as a hang.
"""

import argparse
import json
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT = 512 << 20
"""Bytes by which the data of a child may grow."""

SECONDS = 5.0
"""What one file may take: of processor time, since the machine has other things to do."""

SILENCE = 30.0
"""Seconds after which a child that says nothing hangs."""

SPACE, FACTOR = 96 << 20, 24
"""Bytes that a file may take, and for each byte of it on disk."""

BATCH = 500
"""Cases that one child loads."""


def status(name: str) -> int:
    """A number of bytes of this process, as the kernel knows it."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))


def measured(case: Any) -> dict[str, Any]:
    """What came of one case."""
    from fshard.errors import ShardError

    outcomes, reason = [], ""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin, wall = status("VmRSS"), time.process_time(), time.monotonic()
    for attempt in case.attempts:
        try:
            attempt()
            outcomes.append("accepted")
        except ShardError as error:
            named = case.kind == "schedule" or str(case.path.parent if case.kind == "native" else case.path) in str(
                error
            )
            outcomes.append("refused" if named and len(str(error)) < 20_000 else "badly told")
            reason = reason or str(error)[:300]
        except Exception as error:  # a raw error is what this looks for
            outcomes.append("raw")
            reason = f"{type(error).__name__}: {error}"[:300]
    peak = status("VmHWM") - before
    disk = sum(path.lstat().st_blocks * 512 for path in case.path.rglob("*"))
    taken = {"cpu": time.process_time() - begin, "wall": time.monotonic() - wall, "peak": peak, "disk": disk}
    return {"kind": case.kind, "how": case.how, "outcomes": outcomes, "reason": reason, **taken}


def child(seed: int, first: int, last: int) -> None:
    """Load cases, and write a line for each."""
    import torch

    from tests.security import hostile_cases, hostile_tools

    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="fshard-hostile-"))
    try:
        made, tools = hostile_cases.good(root / "good"), hostile_tools.good()
        bound = status("VmData") + LIMIT
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
        for number in range(first, last):
            print(json.dumps({"begins": number}), flush=True)
            if number % 3:
                case = hostile_cases.make(number, seed, made, root / "case")
            else:
                case = hostile_tools.make(number, seed, tools, root / "case")
            print(json.dumps({"number": number, **measured(case)}), flush=True)
            shutil.rmtree(root / "case")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def forward(lines: Any, to: "queue.SimpleQueue[str]") -> None:
    """Lines as they come, and an empty one at the end."""
    with lines:
        for line in lines:
            to.put(line)
    to.put("")


def results(seed: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    """What came of cases, in order; a child that ends or hangs is followed by another one."""
    while first < last:
        options = ["--seed", str(seed), "--child", str(first), str(last)]
        command = [sys.executable, "-m", "tests.security.hostile", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        reader = threading.Thread(target=forward, args=(process.stdout, lines), daemon=True)
        reader.start()
        at = first
        try:
            while line := lines.get(timeout=SILENCE + (60 if at == first else 0)):
                row = json.loads(line)
                at = row.get("begins", at)
                if "number" in row:
                    yield row
                    first = row["number"] + 1
            ended = f"ended with {process.wait()}"
        except queue.Empty:
            ended = "hangs"
        process.kill()
        process.wait()
        reader.join(SILENCE)
        if first < last:
            yield {"number": at, "kind": "?", "how": "?", "outcomes": [ended], "reason": ended, **NOTHING}
            first = at + 1


NOTHING = {"cpu": 0.0, "wall": 0.0, "peak": 0, "disk": 0}


@dataclass(frozen=True)
class Report:
    """What came of many cases: how many of each outcome, what must not be, and the most that one took."""

    cases: int
    outcomes: Counter[tuple[str, str]]
    faults: list[str]
    slowest: dict[str, Any]
    largest: dict[str, Any]


def fault(row: dict[str, Any]) -> str:
    """What is wrong with a result; empty if nothing is."""
    bad = [outcome for outcome in row["outcomes"] if outcome not in ("refused", "accepted")]
    if row["cpu"] > SECONDS:
        bad.append(f"took {row['cpu']:.1f} s")
    if row["peak"] > SPACE + FACTOR * row["disk"]:
        bad.append(f"took {row['peak'] >> 20} MiB for {row['disk']} bytes")
    where = f"case {row['number']}, {row['kind']}, {row['how']}"
    return f"{where}: {', '.join(bad)}: {row['reason']}" if bad else ""


def run(cases: int, seed: int, first: int = 0) -> Report:
    """Load cases, and add up what came of them."""
    outcomes: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    slowest = largest = {"number": -1, **NOTHING}
    for begin in range(first, first + cases, BATCH):
        for row in results(seed, begin, min(begin + BATCH, first + cases)):
            word = "refused" if "refused" in row["outcomes"] else row["outcomes"][0]
            outcomes[row["kind"], word] += 1
            slowest = max(slowest, row, key=lambda r: r["cpu"])
            largest = max(largest, row, key=lambda r: r["peak"])
            if wrong := fault(row):
                faults.append(wrong)
                print(wrong, flush=True)
    return Report(cases, outcomes, faults, slowest, largest)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.seed, *args.child)
        return 0
    begin = time.monotonic()
    report = run(args.cases, args.seed, args.first)
    for (kind, word), count in sorted(report.outcomes.items()):
        print(f"{kind:8} {word:10} {count}")
    for name, row in (("slowest", report.slowest), ("largest", report.largest)):
        print(
            f"{name}: case {row['number']} ({row.get('kind')}, {row.get('how')}): {row['cpu']:.2f} s of processor, "
            f"{row['wall']:.2f} s in all, peak {row['peak'] / 2**20:.0f} MiB of {row['disk'] / 2**20:.1f} MiB on disk"
        )
    print(f"{report.cases} cases, seed {args.seed}: {len(report.faults)} faults, in {time.monotonic() - begin:.0f} s")
    return 1 if report.faults else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
