"""Host overhead: a tiny GPT in one process, where the host's work for each unit is most of a step.

The claim: sharding costs the host little. Relative to the same model in plain eager PyTorch with fused AdamW. Besides,
the flight recorder, which is always on, takes less than a hundredth of such a step; and so do, on the GPT of 25 MB,
metrics, norms of groups and trackers, the recorder's mapped file, and the live view, which a terminal shows anew once
a second.
"""

import argparse
import io
import statistics
import sys
import time
import warnings
from collections.abc import Sequence

import peers
import torch
from common import Report, Row, arguments, middle, peers_option, ratio
from model import SMALL, TINY
from rich.console import Console

from fshard.runtime.flight.recorder import Flight
from fshard.schedule import Op, Schedule
from fshard.tracking.history import History
from fshard.tracking.screen import screen

BASE = "eager"
ALL = (
    *("eager", "eager clip", "compiled", "ddp", "fsdp1", "fsdp2", "fsdp2 compiled"),
    *("fshard", "fshard clip", "fshard fx", "fshard inductor"),
)
QUICK = ("eager", "fsdp2", "fshard", "fshard clip", "fshard fx")
TRACKED = ("fshard", "fshard tracked", "fshard recorded")
TARGETS = {"fshard": 1.15, "fshard clip": 1.15, "fshard fx": 0.90, "fshard inductor": 0.65}


def measure(args: argparse.Namespace) -> int:
    """Build, check, take turns, report."""
    notes: list[str] = []
    names = peers.select(args.peers or (QUICK if args.quick else ALL), notes)
    rounds = args.rounds or (40 if args.quick else 200)
    configuration = {"model": vars(TINY), "ranks": 1, "threads": 1, "rounds": rounds, "peers": names}
    report = Report("host_overhead", __doc__.splitlines()[0], configuration, notes=notes)
    with peers.process_group():
        built = peers.build(names, TINY)
        peers.check_agreement(built, TINY)
        samples = peers.interleave(built, TINY, rounds, warm=1)
    if "fshard" in names:
        report.rows.append(flight_row("fshard", built["fshard"].train.schedule, samples["fshard"]["wall"]))
    for name in names:
        report.medians[name] = {kind: statistics.median(samples[name][kind]) for kind in ("wall", "cpu")}
        base = "eager clip" if name.endswith(" clip") and "eager clip" in names else BASE
        if name != base and base in names:
            for kind in ("wall", "cpu"):
                pair = samples[name][kind], samples[base][kind]
                report.rows.append(ratio(f"{name} / {base}", kind, *pair, TARGETS.get(name)))
    track(report, args.rounds or (20 if args.quick else 60))
    return report.finish(args)


def track(report: Report, rounds: int) -> None:
    """What it costs to tell and to record everything."""
    with peers.process_group():
        built = peers.build(TRACKED, SMALL)
        peers.check_agreement(built, SMALL)
        samples = peers.interleave(built, SMALL, rounds, warm=1)
    plain, *others = TRACKED
    for name in others:
        for kind in ("wall", "cpu"):
            pair = samples[name][kind], samples[plain][kind]
            report.rows.append(ratio(f"25 MB: {name} / {plain}", kind, *pair, 1.01))
    step = statistics.median(samples[TRACKED[1]]["wall"])
    records = [seconds / step for seconds in built[TRACKED[1]].records[-2 * rounds :]]
    report.rows.append(middle("25 MB: a record / a step", "wall", records, 0.01))
    report.rows.append(flight_row("25 MB", built[plain].train.schedule, samples[plain]["wall"]))
    report.rows.append(middle("a drawing of the live view / the second between two", "wall", drawings(), 0.01))
    for name in TRACKED:
        report.medians[f"25 MB: {name}"] = {kind: statistics.median(samples[name][kind]) for kind in ("wall", "cpu")}


def flight_row(name: str, schedule: Schedule, steps: Sequence[float]) -> Row:
    """What the flight recorder takes of a step: all stamps of its ops, and the note of the run."""
    step = statistics.median(steps)
    return middle(f"{name}: flight recorder / step", "wall", [seconds / step for seconds in stampings(schedule)], 0.01)


def stampings(schedule: Schedule, count: int = 400) -> list[float]:
    """The seconds in which all ops of a run are stamped as an executor does it, the loop around that included."""
    flight, found = Flight(0, 1), []
    for _ in range(count):
        begun = time.perf_counter()
        times: list[float] = []
        ran: list[Op] = []
        flight.begin(schedule, ran, times)
        for op in schedule.ops:
            times.append(time.perf_counter())
            ran.append(op)
        times.append(time.perf_counter())
        found.append(time.perf_counter() - begun)
    return found


def drawings(count: int = 40, width: int = 200) -> list[float]:
    """The seconds in which a terminal of this width is drawn."""
    terminal, history, found = Console(file=io.StringIO(), width=width, force_terminal=True), History("loss"), []
    for step in range(10_000):
        row = {"loss": 1 / (1 + step), "seconds": 0.2, "exposed": 0.05, "outside": 0.1, "lr": 1e-3, "grad_norm": 1.0}
        history.add(step * 0.3, step, row)
    for _ in range(count):
        begun = time.perf_counter()
        terminal.print(screen(history, 20_000, width))
        found.append(time.perf_counter() - begun)
    return found


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    peers_option(cli)
    cli.add_argument("--rounds", type=int, help="steps of each peer")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.exit(measure(arguments(__doc__, options)))
