"""``schedule="auto"``: how soon it settles, and how far its choice is from the best of eight fixed policies.

The claim: it settles within 40 steps, the first of which run the default policy, and then takes at most 1.05 of the
time of the best policy that fits, with and without a limit on memory. Steps of all cases take turns; of each the lower
quartile counts, by the slowest rank, since what else runs on a machine makes steps slower, never faster. Links of a
rate need root, as ``lab.py`` does.
"""

import argparse
import itertools
import sys
from typing import Any

import lab
from auto_models import MODELS
from common import Report, Row, arguments, run_workers

LOOPBACK = "loopback"
REGRET, STEPS = 1.05, 40


def measure(args: argparse.Namespace) -> int:
    """Run the ranks of each setting, report."""
    why = lab.obstacle()
    rates = [rate for rate in args.rates if rate == LOOPBACK or not why]
    models, seconds = args.models or (MODELS[:1] if args.quick else MODELS), args.seconds or (10 if args.quick else 40)
    configuration = {"models": models, "ranks": args.ranks, "rates": rates, "seconds": seconds}
    report = Report("auto", __doc__.splitlines()[0], configuration)
    for rate, ranks in itertools.product(rates, args.ranks):
        link = None if rate == LOOPBACK else rate
        title = f"{ranks} ranks, {rate}"
        found = run_workers(ranks, link, {"models": models, "seconds": seconds}, "auto_rank.py")
        report.medians[title] = found
        for case, told in found.items():
            judge(report, f"{title}: {case}", told)
        report.write(args)
    if why and rates != args.rates:
        report.notes.append(f"Links of a rate were left out: {why}.")
    return report.finish(args)


def judge(report: Report, title: str, told: dict[str, Any]) -> None:
    """The rows of one model in one setting."""
    for label, choice in told["auto"].items():
        fits = [each for each in told["fixed"].values() if choice["limit"] is None or each["peak"] <= choice["limit"]]
        best = min(each["seconds"] for each in fits)
        report.rows.append(
            Row(f"{title}, {label}", "of the best policy's time", choice["seconds"] / best, target=REGRET)
        )
        report.rows.append(Row(f"{title}, {label}: steps until it settles", "steps", choice["settled"], target=STEPS))
        spent = sum(choice["first"][: choice["settled"]]) / choice["settled"] / best
        report.rows.append(Row(f"{title}, {label}: until then", "of the best policy's time", spent))


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--models", nargs="+", choices=MODELS, help="instead of all")
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    cli.add_argument("--rates", nargs="+", default=[LOOPBACK, "1gbit", "200mbit"], help="of each rank's link")
    cli.add_argument("--seconds", type=float, help="of the steps of one model in one setting")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
