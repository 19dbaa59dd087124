"""Foresight: how far predicted step times are from measured ones, and ``auto``'s choice from the best policy.

The claim: with costs of 2 ranks, calibrated over loopback and at 1 Gbit/s, steps on 2 and 4 ranks, over other links,
with other policies and microbatches, are predicted within 5 % (median) and 10 % (worst); and the policy that ``auto``
chooses takes at most 1.02 (median) and 1.05 (worst) of the best one's time. Calibration makes steps of its own: nothing
in the table was used for it. Links of a rate need root, as ``lab.py`` does.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lab
from common import Report, Row, arguments, run_workers
from foresight_models import MODELS

from fshard.schedule import parse
from fshard.schedule.costs import Costs, read_costs
from fshard.schedule.simulate import simulate

MEDIAN, WORST = 0.05, 0.10
REGRET_MEDIAN, REGRET_WORST = 1.02, 1.05


@dataclass(frozen=True)
class Setting:
    """Ranks and their links; ``like`` is the calibration that predicts it, and ``share`` the part of its rate."""

    ranks: int
    rate: str | None
    like: str
    share: float = 1.0
    hsdp: bool = False

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.rate or 'loopback'}{', HSDP 2 x 2' if self.hsdp else ''}"


SETTINGS = (
    Setting(2, None, "loopback"),
    Setting(4, None, "loopback"),
    Setting(4, None, "loopback", hsdp=True),
    Setting(2, "1gbit", "1gbit"),
    Setting(4, "1gbit", "1gbit"),
    Setting(2, "500mbit", "1gbit", 0.5),
    Setting(2, "200mbit", "1gbit", 0.2),
    Setting(4, "200mbit", "1gbit", 0.2),
)
QUICK = (SETTINGS[0], SETTINGS[3])
CALIBRATIONS = {"loopback": SETTINGS[0], "1gbit": SETTINGS[3]}


def measure(args: argparse.Namespace) -> int:
    """Run the ranks of each setting, predict, report."""
    notes: list[str] = []
    settings = [SETTINGS[number] for number in args.settings] if args.settings else QUICK if args.quick else SETTINGS
    why = lab.obstacle()
    if why:
        notes.append(f"Links of a rate were left out: {why}.")
        settings = [setting for setting in settings if setting.rate is None]
    models = args.models or (MODELS[:1] if args.quick else MODELS)
    accumulate = [1] if args.quick else args.accumulate
    rounds = args.rounds or 4
    configuration = {"models": models, "settings": [*map(str, settings)], "accumulate": accumulate, "rounds": rounds}
    report = Report("foresight", __doc__.splitlines()[0], configuration, notes=notes)
    costs: dict[tuple[str, str], Costs] = {}
    errors, regrets, details = [], [], []
    for setting, name in itertools.product(settings, models):
        options = {"models": [name], "accumulate": accumulate, "rounds": rounds}
        if (setting.like, name) not in costs:
            costs[setting.like, name] = calibrated(CALIBRATIONS[setting.like], name, options)
        found = run_workers(setting.ranks, setting.rate, {**options, "hsdp": int(setting.hsdp), **OTHER}, SCRIPT)
        table = [*predicted(setting, found["cases"], costs[setting.like, name])]
        errors += [abs(error) for _, _, error in table]
        regrets += [*regret(found["cases"])]
        details += [*rows(setting, table, found["cases"])]
        report.rows = [*details, *totals(errors, regrets)]
        report.write(args)  # what was measured so far is kept, whatever comes
    return report.finish(args)


def totals(errors: list[float], regrets: list[float]) -> Iterator[Row]:
    """The rows of all settings together."""
    yield Row(
        "all: how far predictions are from what was measured, median", "share", statistics.median(errors), target=MEDIAN
    )
    yield Row("all: how far predictions are from what was measured, worst", "share", max(errors), target=WORST)
    yield Row("all: auto / best policy, median", "wall", statistics.median(regrets), target=REGRET_MEDIAN)
    yield Row("all: auto / best policy, worst", "wall", max(regrets), target=REGRET_WORST)


SCRIPT = "foresight_rank.py"
OTHER = {"auto": 1, "calibrate": 0}


def calibrated(setting: Setting, name: str, options: Mapping[str, Any]) -> Costs:
    """The costs of a model, of 2 ranks."""
    few = {**options, "policies": ["default"], "accumulate": [], "calibrate": 1}
    found = run_workers(setting.ranks, setting.rate, few, SCRIPT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        path.write_text(json.dumps(found["costs"][name]))
        return read_costs(path)


def predicted(setting: Setting, cases: Mapping[str, Any], costs: Costs) -> Iterator[tuple[str, float, float]]:
    """Each case with its predicted seconds, and how far these are from the measured ones."""
    for key, case in cases.items():
        if key.endswith("|auto"):
            continue
        schedule = parse(case["schedule"])
        cost = placed(setting, costs)
        seconds = simulate(schedule, cost.only({op.kind for op in schedule})).seconds
        yield key, seconds, seconds / statistics.median(case["times"]) - 1


def placed(setting: Setting, costs: Costs) -> Costs:
    """The costs of another setting: its links, and the processors that a rank has there."""
    links = {key: replace(link, bytes_per_s=link.bytes_per_s * setting.share) for key, link in costs.links.items()}
    if setting.hsdp:
        links["replica"] = links["shard"]
        links["replica_reduce over replica"] = links["reduce_scatter over shard"]
    return replace(costs, links=links, processors=costs.processors * 2 / setting.ranks)


def regret(cases: Mapping[str, Any]) -> Iterator[float]:
    """The measured time of ``auto`` over that of the best policy, for each model and number of microbatches."""
    for key, case in cases.items():
        name, times, label = key.split("|")
        if label == "auto":
            others = [each["times"] for other, each in cases.items() if other.startswith(f"{name}|{times}|")]
            best = min(statistics.median(each) for each in others)
            yield statistics.median(case["times"]) / best


def rows(setting: Setting, table: list[tuple[str, float, float]], cases: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a setting."""
    for kind in dict.fromkeys(key.rpartition("|")[0] for key, _, _ in table):
        off = [error for key, _, error in table if key.rpartition("|")[0] == kind]
        title = f"{setting}: {kind.replace('|', ', accumulate=')}"
        yield Row(f"{title}: predicted / measured - 1, median", "share", statistics.median(off), min(off), max(off))
        own = {key: case for key, case in cases.items() if key.rpartition("|")[0] == kind}
        for value in regret(own):
            yield Row(f"{title}: auto / best policy", "wall", value)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--models", nargs="+", choices=MODELS, help="instead of all")
    cli.add_argument("--accumulate", type=int, nargs="+", default=[1, 4], help="microbatches")
    cli.add_argument("--rounds", type=int, help="steps of each case")
    cli.add_argument("--settings", type=int, nargs="+", help=f"numbers of settings, 0 to {len(SETTINGS) - 1}")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
