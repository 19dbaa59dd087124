"""Outer steps: the GPT of 25 MB on two hosts that exchange differences every 30 steps, over a link of 200 Mbit/s.

The claim: a step takes the time of its compute, as if there were no slow link, and no step sends more than a part of an
exchange. Rounds of outer steps and of steps of the same replicas without exchanges take turns. Needs root: each host
gets a network namespace (``lab.py``).
"""

import argparse
import statistics
import sys
from dataclasses import asdict

import lab
from common import Report, Row, arguments, ratio, run_workers
from model import SMALL

EVERY, FRAGMENTS, DELAY, WIRE = 30, 4, 1, "int4"
SLOWER, PEAK, BYTES = 1.05, 1 / FRAGMENTS, 1.02


def measure(args: argparse.Namespace) -> int:
    """The hosts, then the report."""
    rounds = args.rounds or (2 if args.quick else 5)
    configuration = {"model": asdict(SMALL), "rate": args.rate, "rounds": rounds, "threads": 1}
    configuration |= {"every": EVERY, "fragments": FRAGMENTS, "delay": DELAY, "wire": WIRE}
    notes: list[str] = []
    report = Report("outer", __doc__.splitlines()[0], configuration, notes=notes)
    why = lab.obstacle()
    if why:
        notes.append(f"skipped: {why}")
        return report.finish(args)
    told = {"every": EVERY, "fragments": FRAGMENTS, "delay": DELAY, "wire": WIRE, "rounds": rounds}
    found = run_workers(2, args.rate, told, "outer_rank.py")
    title = f"{args.rate} between two hosts, every {EVERY} steps, {WIRE}, {FRAGMENTS} fragments"
    report.medians[title] = {name: statistics.median(found[name]) for name in ("outer", "inner")}
    report.rows.append(ratio(f"{title}: outer step / without the link", "wall", found["outer"], found["inner"], SLOWER))
    whole = [sum(sent) for sent in found["sent"]]
    peaks = [max(sent) / total for sent, total in zip(found["sent"], whole, strict=True)]
    report.rows.append(Row(f"{title}: most bytes of a step / an exchange", "bytes", max(peaks), target=round(PEAK, 3)))
    minimum = found["payload"]
    report.rows.append(Row(f"{title}: bytes of an exchange / its minimum", "bytes", max(whole) / minimum, target=BYTES))
    each = statistics.median(whole) / EVERY
    report.rows.append(Row(f"{title}: bytes a step / those of exact sums", "bytes", each / found["synchronous"]))
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--rate", default="200mbit", help="of the link between the hosts, as tc reads it")
    cli.add_argument("--rounds", type=int, help="exchanges of the whole model")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
