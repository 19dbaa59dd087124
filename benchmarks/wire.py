"""The wire: the GPT of 25 MB over links of a given rate, one a rank, and the bytes that go over them.

The claim: communication hides behind compute as far as the link allows, and no rank sends more than 1.02 of the fewest
bytes that can do it. Needs root: each rank gets a network namespace (``lab.py``).
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

import lab
import peers
from common import Report, Row, arguments, peers_option, ratio, run_workers
from model import SMALL

PEERS = (
    "fsdp2",
    "fsdp2 async",
    "fsdp2 no reshard",
    "fsdp2 clip",
    "fsdp1",
    "ddp",
    "fshard",
    "fshard clip",
    "fshard no reshard",
    "fshard lean",
    "fshard prefetch 3",
    "fshard bf16",
)
QUICK = ("fsdp2", "fsdp2 no reshard", "fshard", "fshard no reshard")
CLAIMS = {
    "1gbit": (
        ("fshard", "fsdp2", 0.55),
        ("fshard prefetch 3", "fsdp2", 0.55),
        ("fshard clip", "fsdp2 clip", 0.55),
        ("fshard no reshard", "fsdp2 no reshard", None),
        ("fshard", "ddp", None),
        ("fshard", "fsdp2 async", None),
        ("fshard bf16", "fshard", None),
    ),
    "200mbit": (
        ("fshard", "fsdp2", 0.65),
        ("fshard prefetch 3", "fsdp2", 0.65),
        ("fshard clip", "fsdp2 clip", 0.65),
        ("fshard no reshard", "fsdp2", 0.48),
        ("fshard no reshard", "fsdp2 no reshard", None),  # its bytes alone take 0.60 to 0.63 of that
        ("fshard no reshard", "ddp", 0.95),
        ("fshard", "fsdp2 async", None),
        ("fshard bf16", "fshard", None),
    ),
}
BYTES = 1.02
HALF = 0.51
SPEEDS = {rate: speed * 1448 / 1514 for rate, speed in {"1gbit": 125e6, "200mbit": 25e6}.items()}
"""Bytes of payload a second: each 1448 travel in a frame of 1514. The kernel cuts the frames after it has counted."""


def measure(args: argparse.Namespace) -> int:
    """Run the workers for each rate and number of ranks, report."""
    why = lab.obstacle()
    if why:
        print(f"wire: skipped: {why}")
        return 0
    notes: list[str] = []
    names = peers.select(args.peers or (QUICK if args.quick else PEERS), notes)
    rounds = args.rounds or (3 if args.quick else 8)
    configuration = {"model": asdict(SMALL), "ranks": args.ranks, "rates": args.rates, "threads": 1, "rounds": rounds}
    report = Report("wire", __doc__.splitlines()[0], {**configuration, "peers": names}, notes=notes)
    lost = 0
    for rate in args.rates:
        for ranks in args.ranks:
            try:
                case(report, rate, ranks, {"peers": names, "rounds": rounds})
            except SystemExit as error:  # what the other cases take is not lost with it
                lost = 1
                notes.append(f"{rate}, {ranks} ranks: not measured: {error}")
                print(notes[-1], file=sys.stderr)
    return report.finish(args) or lost


def case(report: Report, rate: str, ranks: int, chosen: dict[str, Any]) -> None:
    """One rate, one number of ranks."""
    options = {**chosen, **asdict(SMALL), "count": 1}
    options.pop("vocabulary")
    found = run_workers(ranks, rate, options)
    samples, title = found["samples"], f"{rate} {ranks} ranks"
    report.medians[title] = {
        name: {kind: statistics.median(sample[kind]) for kind in sample} for name, sample in samples.items()
    }
    claims = CLAIMS.get(rate, ())
    claimed = {over for over, under, _ in claims if under == "fsdp2"} | {"fsdp2"}
    rest = [(name, "fsdp2", None) for name in samples if name not in claimed and not name.endswith(" clip")]
    for over, under, target in (*claims, *rest):
        if over in samples and under in samples:
            pair = samples[over]["wall"], samples[under]["wall"]
            report.rows.append(ratio(f"{title}: {over} / {under}", "wall", *pair, target))
            if target is not None and rate in SPEEDS:
                alone = [bytes_sent / SPEEDS[rate] for bytes_sent in samples[over]["sent"]]
                report.rows.append(ratio(f"{title}: {over}, its bytes alone / {under}", "ideal", alone, pair[1]))
    for name, sample in samples.items():
        sent = statistics.median(sample["sent"])
        least = found["minimum"][name]
        if least:
            target = HALF if name.endswith("bf16") else BYTES
            report.rows.append(Row(f"{title}: {name} / its minimum", "bytes", sent / least, target=target))
        elif name in ("fsdp2", "ddp") and "fshard" in samples:
            least = found["minimum"]["fshard"]
            report.rows.append(Row(f"{title}: {name} / minimum of fshard", "bytes", sent / least))


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    peers_option(cli)
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    cli.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of each rank's link, as tc reads it")
    cli.add_argument("--rounds", type=int, help="steps of each peer")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
