"""Muon: matrices that are whole on one rank, against gathering each of them for the update.

The claim: with ``align="leaf"`` a step takes less time than where every rank gathers every matrix and iterates it, by
what the other ranks' products take, and the gathers. Loopback; a GPT of 25 MB.
"""

import argparse
import statistics
import sys
from dataclasses import asdict, replace
from typing import Any

import muons
from common import Report, arguments, ratio, run_workers
from model import SMALL

NAMES = list(muons.PEERS)
TARGETS = {"muon gathered": 0.9, "fsdp2 muon gathered": 0.7}


def measure(args: argparse.Namespace) -> int:
    """Run the workers at each number of ranks, report."""
    rounds = args.rounds or (6 if args.quick else 20)
    size = replace(SMALL, **{name: value for name in ("depth", "width", "tokens") if (value := getattr(args, name))})
    configuration = {"model": asdict(size), "ranks": args.ranks, "threads": 1, "rounds": rounds, "peers": NAMES}
    report = Report("muon", __doc__.splitlines()[0], configuration)
    for ranks in args.ranks:
        options: dict[str, Any] = {"peers": NAMES, "rounds": rounds, **asdict(size)}
        options.pop("vocabulary")
        samples = run_workers(ranks, None, options)["samples"]
        report.medians[f"{ranks} ranks"] = {
            name: {kind: statistics.median(samples[name][kind]) for kind in ("wall", "cpu")} for name in NAMES
        }
        for under, target in TARGETS.items():
            for kind in ("wall", "cpu"):
                pair = samples["muon whole"][kind], samples[under][kind]
                report.rows.append(ratio(f"{ranks} ranks: muon whole / {under}", kind, *pair, target))
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    for name in ("rounds", "depth", "width", "tokens"):
        cli.add_argument(f"--{name}", type=int, help="instead of the benchmark's own")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
