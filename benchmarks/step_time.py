"""Step time: a GPT of 25 MB on loopback, where nothing limits the ranks but their own work.

The claim: a step takes at most 0.60 of FSDP2's time and 0.75 of its CPU time, and less time than DDP's, which shards
nothing. Plain PyTorch, each rank alone without any communication, shows how much there is to win.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import peers
from common import Report, arguments, peers_option, ratio, run_workers
from model import SMALL

ALL = (
    "eager",
    "fsdp2",
    "fsdp2 async",
    "fsdp2 no reshard",
    "fsdp2 clip",
    "fsdp2 compiled",
    "fsdp1",
    "ddp",
    "fshard",
    "fshard clip",
    "fshard no reshard",
    "fshard lean",
    "fshard prefetch 3",
)
QUICK = ("eager", "fsdp2", "fsdp2 no reshard", "ddp", "fshard", "fshard no reshard")
CLAIMS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("fshard", "fsdp2", {"wall": 0.60, "cpu": 0.75}),
    ("fshard clip", "fsdp2 clip", {"wall": 0.60, "cpu": 0.75}),
    ("fshard no reshard", "fsdp2 no reshard", {"wall": 0.60, "cpu": 0.75}),
    ("fshard no reshard", "ddp", {"wall": 0.95}),
    ("fshard", "fsdp2 async", {}),
)


def measure(args: argparse.Namespace) -> int:
    """Run the workers at each number of ranks, report."""
    notes: list[str] = []
    names = peers.select(args.peers or (QUICK if args.quick else ALL), notes)
    rounds = args.rounds or (6 if args.quick else 20)
    size = replace(SMALL, **{name: value for name in ("depth", "width", "tokens") if (value := getattr(args, name))})
    configuration = {"model": asdict(size), "ranks": args.ranks, "threads": 1, "rounds": rounds, "peers": names}
    report = Report("step_time", __doc__.splitlines()[0], configuration, notes=notes)
    for ranks in args.ranks:
        options: dict[str, Any] = {"peers": names, "rounds": rounds, **asdict(size)}
        options.pop("vocabulary")
        samples = run_workers(ranks, None, options)["samples"]
        report.medians[f"{ranks} ranks"] = {
            name: {kind: statistics.median(samples[name][kind]) for kind in ("wall", "cpu")} for name in names
        }
        for over, under, targets in (*CLAIMS, *((name, "fsdp2", {}) for name in unclaimed(names))):
            for kind in ("wall", "cpu"):
                if over in names and under in names:
                    pair = samples[over][kind], samples[under][kind]
                    report.rows.append(ratio(f"{ranks} ranks: {over} / {under}", kind, *pair, targets.get(kind)))
    return report.finish(args)


def unclaimed(names: Sequence[str]) -> list[str]:
    """The peers that are compared with FSDP2 for comparison's sake."""
    claimed = {over for over, under, _ in CLAIMS if under == "fsdp2"} | {"fsdp2"}
    return [name for name in names if name not in claimed and not name.endswith(" clip")]


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    peers_option(cli)
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    for name in ("rounds", "depth", "width", "tokens"):
        cli.add_argument(f"--{name}", type=int, help="instead of the benchmark's own")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
