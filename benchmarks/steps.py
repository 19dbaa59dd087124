"""Steps written from parts: the ready-made step by hand, SAM, a GAN and DPO, on the GPT of 25 MB.

The claim: a step from parts is one schedule like a train step. The ready-made step by hand takes at most 1.01 of its
time, with the same bits; SAM takes what a train step and another forward and backward of this rank alone take; a GAN
takes no more than both of its players' train steps on plans of their own; DPO sends the fewest bytes that can do it.
Links need root: each rank gets a network namespace (``lab.py``).
"""

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

import compositions
import lab
from common import Report, Row, arguments, peers_option, ratio, run_workers
from model import SMALL

LOOPBACK = "loopback"
CLAIMS: tuple[tuple[str, tuple[str, ...], dict[str, float]], ...] = (
    ("by parts", ("train step",), {"wall": 1.01, "cpu": 1.01}),
    ("by parts clip", ("train step clip",), {"wall": 1.01, "cpu": 1.01}),
    ("sam", ("train step", "alone"), {"wall": 1.05}),
    ("sam", ("train step", "train step"), {}),
    ("sam own", ("train step", "alone"), {"wall": 1.05}),
    ("gan", ("gan apart",), {"wall": 1.0}),
    ("train step", ("alone",), {}),
)
"""What is compared with the sum of what, and at most by which factor."""
BYTES = 1.02


def measure(args: argparse.Namespace) -> int:
    """Run the workers for each rate and number of ranks, report."""
    notes: list[str] = []
    names = [name for name in args.peers or compositions.PEERS if name in compositions.PEERS]
    rounds = args.rounds or (6 if args.quick else 20)
    why = lab.obstacle()
    rates = [rate for rate in args.rates if rate == LOOPBACK or not why]
    if why and rates != args.rates:
        notes.append(f"{', '.join(args.rates)}: skipped but for loopback: {why}")
    configuration = {"model": asdict(SMALL), "ranks": args.ranks, "rates": rates, "threads": 1, "rounds": rounds}
    report = Report("steps", __doc__.splitlines()[0], {**configuration, "peers": names}, notes=notes)
    for rate in rates:
        for ranks in args.ranks:
            case(report, rate, ranks, {"peers": names, "rounds": rounds})
    return report.finish(args)


def case(report: Report, rate: str, ranks: int, chosen: dict[str, Any]) -> None:
    """One rate, one number of ranks."""
    linked = rate != LOOPBACK
    options = {**chosen, **asdict(SMALL), "count": int(linked)}
    options.pop("vocabulary")
    found = run_workers(ranks, rate if linked else None, options, "steps_rank.py")
    samples, title = found["samples"], f"{rate} {ranks} ranks"
    report.medians[title] = {
        name: {kind: statistics.median(sample[kind]) for kind in sample} for name, sample in samples.items()
    }
    for over, under, targets in CLAIMS:
        for kind in ("wall", "cpu"):
            if {over, *under} <= set(samples):
                sums = [sum(column) for column in zip(*(samples[name][kind] for name in under), strict=True)]
                words = f"{title}: {over} / {' + '.join(under)}"
                # Over a link the sum leaves out what it has to wait for: SAM sends twice what a train step does.
                target = None if linked and len(under) > 1 else targets.get(kind)
                report.rows.append(ratio(words, kind, samples[over][kind], sums, target))
    unlike = [name for name, same in found["bits"].items() if not same]
    report.rows.append(Row(f"{title}: options in which the bits differ by hand", "of 6", len(unlike), target=0))
    report.notes += [f"{title}: other bits by hand with {name}" for name in unlike]
    if "dpo" in found:
        fewest, scheduled = found["dpo"]["fewest"], found["dpo"]["scheduled"]
        words = f"{title}: dpo, by its schedule / the fewest"
        report.rows.append(Row(words, "bytes", scheduled / fewest, target=BYTES))
        if linked:
            sent = statistics.median(samples["dpo"]["sent"])
            report.rows.append(Row(f"{title}: dpo, on the link / the fewest", "bytes", sent / fewest, target=BYTES))


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    peers_option(cli)
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    cli.add_argument("--rates", nargs="+", default=[LOOPBACK, "1gbit"], help="of each rank's link, as tc reads it")
    cli.add_argument("--rounds", type=int, help="steps of each peer")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
