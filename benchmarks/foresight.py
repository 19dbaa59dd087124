"""Foresight: how far predicted step times are from measured ones, and ``auto``'s choice from the best policy.

The claim: with costs of 2 ranks, calibrated over loopback and at 1 Gbit/s, steps on 2 and 4 ranks, over other links,
with other policies and microbatches, are predicted within 5 % (median) and 10 % (worst); and the policy that ``auto``
chooses, with and without a limit on memory, takes at most 1.02 (median) and 1.05 (worst) of the time of the best one
that fits. Calibration makes steps of its own: nothing in the table was used for it. Links of a rate need root, as
``lab.py`` does.

All of it takes most of an hour. ``--resume --minutes 4`` measures a part of it: pieces that the results lack, as long
as there is time. A piece is one model in one setting, and is kept as soon as it is measured. ``--runs FOLDER`` keeps
what ranks have measured, and takes from there what it holds: predictions of a changed simulator need no new steps.
"""

import argparse
import datetime
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lab
from common import Report, Row, arguments, results_path, run_workers
from foresight_models import MODELS

import fshard as fs
from fshard.schedule import parse
from fshard.schedule.costs import Costs, Link, read_costs
from fshard.schedule.simulate import simulate

MEDIAN, WORST = 0.05, 0.10
REGRET_MEDIAN, REGRET_WORST = 1.02, 1.05

FEW = ("default", "prefetch 0", "prefetch 3", "keep 2", "keep all")
"""The policies on 4 ranks; on 2 there are all eight."""


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

    @property
    def options(self) -> dict[str, Any]:
        """What its ranks are told."""
        return {"hsdp": int(self.hsdp), **({"policies": [*FEW]} if self.ranks > 2 else {})}


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
SCRIPT = "foresight_rank.py"


def measure(args: argparse.Namespace) -> int:
    """Run the ranks of each setting, predict, report."""
    settings, why = [SETTINGS[number] for number in args.settings or range(len(SETTINGS))], lab.obstacle()
    settings = [*QUICK] if args.quick and not args.settings else settings
    links = [setting for setting in settings if setting.rate is None or why is None]
    models = args.models or (MODELS[:1] if args.quick else MODELS)
    accumulate, rounds = args.accumulate or ([1] if args.quick else [1, 4]), args.rounds
    configuration = {"models": models, "settings": [*map(str, SETTINGS)], "accumulate": accumulate, "rounds": rounds}
    report = Report("foresight", __doc__.splitlines()[0], configuration, medians=before(args))
    machine = Machine({"accumulate": accumulate, "rounds": rounds}, args.runs)
    begun = time.monotonic()
    for setting, name in itertools.product(links, models):
        key = f"{setting}: {name}"
        if key in report.medians or (time.monotonic() - begun) / 60 > args.minutes:
            continue
        report.medians[key] = machine.piece(setting, name)
        told(report, models)
        report.write(args)  # what was measured so far is kept, whatever comes
    told(report, models)
    if why:
        report.notes.append(f"Links of a rate were left out: {why}.")
    return report.finish(args)


def before(args: argparse.Namespace) -> dict[str, Any]:
    """The pieces that the results hold, where they are to be kept."""
    path = results_path(args, "foresight")
    found: dict[str, Any] = json.loads(path.read_text())["medians"] if args.resume and path.exists() else {}
    return found


class Machine:
    """Measures pieces. ``best`` is the fastest that the machine did the fixed work of ``calm.py``, in seconds.

    What ranks write is kept in the folder ``runs``, if one is given, and is not measured again where it is there.
    """

    def __init__(self, options: Mapping[str, Any], runs: Path | None = None) -> None:
        self.options, self.best, self.runs = options, 0.0, runs
        self.costs: dict[tuple[str, str], tuple[Costs, float]] = {}

    def piece(self, setting: Setting, name: str) -> dict[str, Any]:
        """One model in one setting: predicted and measured seconds of each case, and how calm it was."""
        if (setting.like, name) not in self.costs:
            few = {"policies": [], "accumulate": [], "calibrate": 1}
            found = self._run(CALIBRATIONS[setting.like], name, few)
            made = found["costs"][name]
            self.costs[setting.like, name] = read(made["costs"]), made["work"]
        begun = time.monotonic()
        found = self._run(setting, name, {"auto": 1, "calibrate": 0, **setting.options})
        costs, work = self.costs[setting.like, name]
        costs = placed(setting, costs)
        return {
            "cases": {key: predicted(case, costs, case["work"] / work) for key, case in found["cases"].items()},
            "disturbed": found["disturbed"],
            "turns": found["turns"],
            "minutes": (time.monotonic() - begun) / 60,
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        }

    def _run(self, setting: Setting, name: str, options: Mapping[str, Any]) -> Any:
        every = {**self.options, "models": [name], **options}
        kept = self.runs and self.runs / f"{setting}, {name}{', costs' * every['calibrate']}.json"
        if kept and kept.exists():
            found = json.loads(kept.read_text())
        else:
            found = run_workers(setting.ranks, setting.rate, {**every, "best": self.best}, SCRIPT)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(found))
        self.best = min(self.best or found["best"], found["best"])
        return found


def read(values: Any) -> Costs:
    """Costs from what a rank has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        path.write_text(json.dumps(values))
        return read_costs(path)


def predicted(case: Mapping[str, Any], costs: Costs, slow: float) -> dict[str, Any]:
    """A case with its predicted seconds, the median of the measured ones, and what is predicted for another speed.

    The minute of the calibration and that of the case may differ in how much of the processors this machine gets. The
    fixed work tells: ``slow`` is the fixed work beside the case to that beside the calibration. ``scaled`` is predicted
    for the speed of the case's minute.
    """
    schedule = parse(case["schedule"])
    costs = costs.only({op.kind for op in schedule})
    known = {key: case[key] for key in ("policy", "peak", "limit")}
    return {
        "predicted": simulate(schedule, costs).seconds,
        "scaled": simulate(schedule, at_speed(costs, slow)).seconds,
        "measured": statistics.median(case["times"]),
        "slow": slow,
        **known,
    }


def at_speed(costs: Costs, slow: float) -> Costs:
    """The costs where processors take so many times as long. Wires do not."""

    def link(each: Link) -> Link:
        return replace(each, sending=each.sending * slow, beside=each.beside * slow, taking=each.taking * slow)

    seconds = {op: value * slow for op, value in costs.seconds.items()}
    links = {axes: link(each) for axes, each in costs.links.items()}
    return replace(costs, seconds=seconds, host=costs.host * slow, links=links)


def placed(setting: Setting, costs: Costs) -> Costs:
    """The costs of another setting: its links, and the processors that a rank has there."""
    links = {key: replace(link, bytes_per_s=link.bytes_per_s * setting.share) for key, link in costs.links.items()}
    if setting.hsdp:
        links["replica"] = links["shard"]
        links["replica_reduce over replica"] = links["reduce_scatter over shard"]
    sizes, names = ((2, 2), ("replica", "shard")) if setting.hsdp else ((setting.ranks,), ("shard",))
    costs = replace(costs, links=links, processors=costs.processors * 2 / setting.ranks)
    return costs.among(fs.abstract_mesh(sizes, names))


def told(report: Report, models: Sequence[str]) -> None:
    """The rows of all pieces, and what is missing."""
    pieces = {key: report.medians[key] for key in wanted(models) if key in report.medians}
    report.rows = [row for key, piece in pieces.items() for row in rows(key, piece["cases"])]
    found = [error for piece in pieces.values() for error in errors(piece["cases"]).values()]
    scaled = [abs(error) for piece in pieces.values() for error in errors(piece["cases"], "scaled").values()]
    choices = [value for piece in pieces.values() for value in regrets(piece["cases"]).values()]
    if found:
        title = "all: how far predictions are from what was measured"
        median, worst = statistics.median(map(abs, found)), max(map(abs, found))
        report.rows += [Row(f"{title}, median", "share", median, target=MEDIAN)]
        report.rows += [Row(f"{title}, worst", "share", worst, target=WORST)]
        title = "all: the same, at the speed of each minute by fixed work"
        for name, value in (("median", statistics.median(scaled)), ("worst", max(scaled))) if scaled else ():
            report.rows.append(Row(f"{title}, {name}", "share", value))
        title = "all: auto / best policy that fits"
        report.rows += [Row(f"{title}, median", "wall", statistics.median(choices), target=REGRET_MEDIAN)]
        report.rows += [Row(f"{title}, worst", "wall", max(choices), target=REGRET_WORST)]
    disturbed, turns = (sum(piece[name] for piece in pieces.values()) for name in ("disturbed", "turns"))
    dates = sorted(piece["date"] for piece in pieces.values())
    report.notes = [
        f"{len(pieces)} of {len(wanted(models))} pieces are measured, from {dates[0]} to {dates[-1]}; {disturbed} of "
        f"{turns} turns were disturbed, and those do not count where enough others are calm."
    ] * bool(pieces)


def wanted(models: Sequence[str]) -> list[str]:
    """All pieces, in their order."""
    return [f"{setting}: {name}" for setting, name in itertools.product(SETTINGS, models)]


def kinds(cases: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The cases of each number of microbatches, by label."""
    found: dict[str, dict[str, Any]] = {}
    for key, case in cases.items():
        _, times, label = key.split("|")
        found.setdefault(times, {})[label] = case
    return found


def errors(cases: Mapping[str, Any], how: str = "predicted") -> dict[str, float]:
    """How far each prediction is from what was measured, but those of ``auto``, which is one of the policies."""
    given = {key: c for key, c in cases.items() if how in c and not key.rpartition("|")[2].startswith("auto")}
    return {key: case[how] / case["measured"] - 1 for key, case in given.items()}


def regrets(cases: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The measured time of ``auto`` over that of the best policy that fits, by microbatches and label."""
    found = {}
    for times, own in kinds(cases).items():
        for label in [label for label in own if label.startswith("auto")]:
            limit = own[label]["limit"] or float("inf")
            fits = [case["measured"] for case in own.values() if case["peak"] <= limit]
            found[times, label] = own[label]["measured"] / min(fits)
    return found


def rows(piece: str, cases: Mapping[str, Any]) -> Iterator[Row]:
    """The rows of a piece."""
    for times, own in kinds(cases).items():
        off = [*errors({f"||{label}": case for label, case in own.items()}).values()]
        title = f"{piece}, accumulate={times}"
        yield Row(f"{title}: predicted / measured - 1, median", "share", statistics.median(off), min(off), max(off))
    for (times, label), value in regrets(cases).items():
        yield Row(f"{piece}, accumulate={times}: {label} / best policy that fits", "wall", value)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--models", nargs="+", choices=MODELS, help="instead of all")
    cli.add_argument("--accumulate", type=int, nargs="+", help="microbatches; by default 1 and 4")
    cli.add_argument("--rounds", type=int, default=3, help="turns of each case")
    cli.add_argument("--settings", type=int, nargs="+", help=f"numbers of settings, 0 to {len(SETTINGS) - 1}")
    cli.add_argument("--runs", type=Path, help="a folder that keeps what was measured, and is read where it has it")
    cli.add_argument("--resume", action="store_true", help="keep the pieces that the results hold, and add others")
    cli.add_argument("--minutes", type=float, default=1e9, help="begin no piece later than this")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
