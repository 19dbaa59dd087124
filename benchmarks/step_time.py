"""Step time: a GPT of 25 MB on loopback, where nothing limits the ranks but their own work.

The claim: a step takes at most 0.60 of FSDP2's time and 0.75 of its CPU time, and less time than DDP's, which shards
nothing. Plain PyTorch, each rank alone without any communication, shows how much there is to win.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

from common import Report, arguments, ratio, run_workers
from model import SMALL

ALL = (
    "eager",
    "fsdp2",
    "fsdp2 no reshard",
    "fsdp2 clip",
    "fsdp1",
    "ddp",
    "fshard",
    "fshard clip",
    "fshard no reshard",
    "fshard prefetch 2",
)
QUICK = ("eager", "fsdp2", "fsdp2 no reshard", "ddp", "fshard", "fshard no reshard")
CLAIMS = (
    ("fshard", "fsdp2", {"wall": 0.60, "cpu": 0.75}),
    ("fshard clip", "fsdp2 clip", {"wall": 0.60, "cpu": 0.75}),
    ("fshard no reshard", "fsdp2 no reshard", {"wall": 0.60, "cpu": 0.75}),
    ("fshard no reshard", "ddp", {"wall": 0.95}),
    ("fshard prefetch 2", "fsdp2", {}),
    ("fsdp1", "fsdp2", {}),
    ("ddp", "fsdp2", {}),
    ("eager", "fsdp2", {}),
)


def measure(args: argparse.Namespace) -> int:
    """Run the workers at each number of ranks, report."""
    names = list(QUICK if args.quick else ALL)
    rounds = args.rounds or (6 if args.quick else 20)
    size = replace(SMALL, **{name: value for name in ("depth", "width", "tokens") if (value := getattr(args, name))})
    configuration = {"model": asdict(size), "ranks": args.ranks, "threads": 1, "rounds": rounds, "peers": names}
    report = Report("step_time", __doc__.splitlines()[0], configuration)
    for ranks in args.ranks:
        options: dict[str, Any] = {"peers": names, "rounds": rounds, **asdict(size)}
        options.pop("vocabulary")
        samples = run_workers(ranks, None, options)["samples"]
        report.medians[f"{ranks} ranks"] = {
            name: {kind: statistics.median(samples[name][kind]) for kind in ("wall", "cpu")} for name in names
        }
        for over, under, targets in CLAIMS:
            for kind in ("wall", "cpu"):
                if over in names and under in names:
                    pair = samples[over][kind], samples[under][kind]
                    report.rows.append(ratio(f"{ranks} ranks: {over} / {under}", kind, *pair, targets.get(kind)))
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    for name in ("rounds", "depth", "width", "tokens"):
        cli.add_argument(f"--{name}", type=int, help="instead of the benchmark's own")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
