"""Host overhead: a tiny GPT in one process, where the host's work for each unit is most of a step.

The claim: sharding costs the host little. Relative to the same model in plain eager PyTorch with fused AdamW.
"""

import argparse
import statistics
import sys
import warnings

import peers
import torch
from common import Report, arguments, peers_option, ratio
from model import TINY

BASE = "eager"
ALL = (
    *("eager", "eager clip", "compiled", "ddp", "fsdp1", "fsdp2", "fsdp2 compiled"),
    *("fshard", "fshard clip", "fshard fx", "fshard inductor"),
)
QUICK = ("eager", "fsdp2", "fshard", "fshard clip", "fshard fx")
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
    for name in names:
        report.medians[name] = {kind: statistics.median(samples[name][kind]) for kind in ("wall", "cpu")}
        base = "eager clip" if name.endswith(" clip") and "eager clip" in names else BASE
        if name != base and base in names:
            for kind in ("wall", "cpu"):
                pair = samples[name][kind], samples[base][kind]
                report.rows.append(ratio(f"{name} / {base}", kind, *pair, TARGETS.get(name)))
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    peers_option(cli)
    cli.add_argument("--rounds", type=int, help="steps of each peer")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.exit(measure(arguments(__doc__, options)))
