"""Foresight: how far predicted step times are from measured ones, and ``auto``'s choice from the best policy.

The claim: with costs of 2 ranks, calibrated over loopback and at 1 Gbit/s, steps on 2 and 4 ranks, over other links,
with other policies and microbatches, are predicted within 5 % (median) and 10 % (worst); and the policy that ``auto``
chooses, with and without a limit on memory, takes at most 1.02 (median) and 1.05 (worst) of the time of the best one
that fits. Calibration makes steps of its own: nothing in the table was used for it. Links of a rate need root, as
``lab.py`` does.

Steps of all cases take turns, and of each case those around the lower quartile count, as in calibrations: what else
runs on a machine makes steps slower, never faster, and these machines are shared. Calibrations take turns with them, on
ranks of their own, so that both see the same minute. Where four ranks share two processors, two calibrations of two
ranks each run side by side: what a rank computes takes longer where the others' data do not fit into the caches beside
its own. How much slower all steps were is told, and how far the steps of the first half of that minute are from those
of the second: no prediction can be closer than that. A piece in which they differ by more than 5 % at the median is
measured again, up to ``--tries`` times; so is one in which the quartiles of what its calibrations foresee are more than
10 % apart. The calmest try counts, however close its predictions are.

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
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lab
from common import Report, Row, arguments, results_path, run_workers
from foresight_models import MODELS

import fshard as fs
from fshard.schedule import parse
from fshard.schedule.costs import Costs, read_costs
from fshard.schedule.fit import counted
from fshard.schedule.link import Link
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

FEWEST = 3
"""Calibrations that a case needs beside it."""

CALM = 0.05
"""A piece is measured again if the halves of its minute differ by more than this, at the median of its cases, or if
half of its calibrations are further from their median."""


def measure(args: argparse.Namespace) -> int:
    """Run the ranks of each setting, predict, report."""
    settings, why = [SETTINGS[number] for number in args.settings or range(len(SETTINGS))], lab.obstacle()
    settings = [*QUICK] if args.quick and not args.settings else settings
    links = [setting for setting in settings if setting.rate is None or why is None]
    models = args.models or (MODELS[:1] if args.quick else MODELS)
    accumulate = args.accumulate or ([1] if args.quick else [1, 4])
    options = {"accumulate": accumulate, "seconds": args.seconds or (10 if args.quick else 90)}
    configuration = {"models": models, "settings": [*map(str, SETTINGS)], **options}
    report = Report("foresight", __doc__.splitlines()[0], configuration, medians=before(args))
    machine = Machine(options, args.runs, args.tries or (1 if args.quick else 3))
    begun = time.monotonic()
    every = MODELS if args.resume else models
    for setting, name in itertools.product(links, models):
        key = f"{setting}: {name}"
        if key in report.medians or (time.monotonic() - begun) / 60 > args.minutes:
            continue
        report.medians[key] = machine.piece(setting, name)
        told(report, every)
        report.write(args)  # what was measured so far is kept, whatever comes
    told(report, every)
    if why:
        report.notes.append(f"Links of a rate were left out: {why}.")
    return report.finish(args)


def before(args: argparse.Namespace) -> dict[str, Any]:
    """The pieces that the results hold, where they are to be kept. Older ones, without halves of a minute, are not."""
    path = results_path(args, "foresight")
    found: dict[str, Any] = json.loads(path.read_text())["medians"] if args.resume and path.exists() else {}
    return {key: piece for key, piece in found.items() if all("halves" in case for case in piece["cases"].values())}


class Machine:
    """Measures pieces, each up to so many times until the machine was calm.

    What ranks write in the calmest of them is kept in the folder ``runs``, if one is given, and taken from there.
    """

    def __init__(self, options: Mapping[str, Any], runs: Path | None = None, tries: int = 1) -> None:
        self.options, self.runs, self.tries = options, runs, tries

    def piece(self, setting: Setting, name: str) -> dict[str, Any]:
        """One model in one setting: predicted and measured seconds of each case, and how disturbed it was."""
        found = self._run(setting, name)
        cases = {}
        for key, case in pooled(found["cases"]).items():
            costs = near(setting, with_microbatches(found, key.split("|")[1]), case)
            cases[key] = predicted(case, costs)
        return {
            "cases": cases,
            "disturbed": statistics.median(case["disturbed"] for case in cases.values()),
            "date": found["date"],
        }

    def _run(self, setting: Setting, name: str) -> Any:
        kept = self.runs and self.runs / f"{setting}, {name}.json"
        found = [json.loads(kept.read_text())] if kept and kept.exists() else []
        disturbed = partial(unrest, setting)
        while len(found) < self.tries and not (found and disturbed(found[-1]) <= CALM):
            found.append(together(setting, {**self.options, "models": [name]}))
            found[-1]["date"] = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
        calmest = min(found, key=disturbed)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(calmest))
        return calmest


def together(setting: Setting, options: Mapping[str, Any]) -> Any:
    """Run the ranks of all cases, and those of calibrations, which take turns until the cases are over.

    There are as many jobs of calibrations side by side as fill the processors that the cases have.
    """
    like = CALIBRATIONS[setting.like]
    jobs = setting.ranks // like.ranks
    with ProcessPoolExecutor(jobs) as pool, tempfile.TemporaryDirectory() as folder:
        calibrating = {**options, "turns": folder, "policies": [], "accumulate": [], "calibrate": jobs}
        others = [
            pool.submit(run_workers, like.ranks, like.rate, {**calibrating, "job": job}, SCRIPT) for job in range(jobs)
        ]
        try:
            asked = {**options, "turns": folder, "auto": 1, "calibrate": 0, **setting.options}
            found = run_workers(setting.ranks, setting.rate, asked, SCRIPT)
        finally:
            (Path(folder) / "over").touch()
        calibrated = [other.result() for other in others]
    return {"costs": [made for each in calibrated for made in each["costs"]], "cases": found["cases"]}


def near(setting: Setting, calibrations: Sequence[Any], case: Mapping[str, Any]) -> Costs:
    """The median of the calibrations in a case's minute, by what they foresee for it; or of all if these are few."""
    found = foreseen(setting, calibrations, case)
    return found[len(found) // 2][1]


def foreseen(setting: Setting, calibrations: Sequence[Any], case: Mapping[str, Any]) -> list[tuple[float, Costs]]:
    """What the calibrations in a case's minute foresee for it, and their costs; those of all if these are few."""
    begun, over = case["span"]
    found = [made["costs"] for made in calibrations if begun <= made["at"] <= over]
    used = found if len(found) >= FEWEST else [made["costs"] for made in calibrations]
    costs = [placed(setting, read(each)) for each in used]
    schedule = parse(case["schedule"])
    kinds = {op.kind for op in schedule}
    return sorted([(simulate(schedule, each.only(kinds)).seconds, each) for each in costs], key=lambda pair: pair[0])


def read(values: Any) -> Costs:
    """Costs from what a rank has written."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        path.write_text(json.dumps(values))
        return read_costs(path)


def pooled(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Cases of one schedule have the steps of all of them: what ``auto`` has chosen may be one of the policies."""
    times: dict[str, list[float]] = {}
    for case in cases.values():
        times.setdefault(case["schedule"], []).extend(case["times"])
    return {key: {**case, "times": times[case["schedule"]]} for key, case in cases.items()}


def predicted(case: Mapping[str, Any], costs: Costs) -> dict[str, Any]:
    """A case: seconds predicted, those of steps that count, and how much longer half of all steps took."""
    schedule, times = parse(case["schedule"]), case["times"]
    costs = costs.only({op.kind for op in schedule})
    measured = usual(times)
    return {
        "predicted": simulate(schedule, costs).seconds,
        "measured": measured,
        "halves": halves(times),
        "steps": len(times),
        "disturbed": statistics.median(times) / measured,
        **{key: case[key] for key in ("policy", "peak", "limit")},
    }


def halves(times: Sequence[float]) -> float:
    """How much slower the second half of some steps was than the first."""
    half = len(times) // 2
    return usual(times[half:]) / usual(times[:half]) - 1


def unrest(setting: Setting, found: Mapping[str, Any]) -> float:
    """How far the halves of a piece are from each other, or its calibrations from their median.

    Of each it is the median over cases, of the microbatches with most.
    """
    steps: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    for key, case in pooled(found["cases"]).items():
        times = key.split("|")[1]
        steps.setdefault(times, []).append(abs(halves(case["times"])))
        costs.setdefault(times, []).append(spread(setting, with_microbatches(found, times), case))
    return max(map(statistics.median, [*steps.values(), *costs.values()]))


def spread(setting: Setting, calibrations: Sequence[Any], case: Mapping[str, Any]) -> float:
    """How far half of the calibrations are from their median, by what they foresee for a case."""
    if len(calibrations) < FEWEST:
        return 0.0
    every = [seconds for seconds, _ in foreseen(setting, calibrations, case)]
    low, middle, high = statistics.quantiles(every)
    return (high - low) / middle / 2


def with_microbatches(found: Mapping[str, Any], times: str) -> list[Any]:
    """The calibrations with so many microbatches."""
    return [made for made in found["costs"] if made["accumulate"] == int(times)]


def usual(times: Sequence[float]) -> float:
    """The mean of the steps around the lower quartile."""
    return statistics.fmean([times[number] for number in counted([times])])


def placed(setting: Setting, costs: Costs) -> Costs:
    """The costs of another setting: its links, and the ranks that take part."""
    links = {key: slower(link, setting.share) for key, link in costs.links.items()}
    if setting.hsdp:
        links["replica"] = links["shard"]
        links["replica_reduce over replica"] = links["reduce_scatter over shard"]
        known = {kind: costs.of(kind, "") for kind in ("reduce_scatter", "wait reduce_scatter")}
        added = {(kind.replace("reduce_scatter", "replica_reduce"), ""): value for kind, value in known.items()}
        costs = replace(costs, seconds={**costs.seconds, **added})
    sizes, names = ((2, 2), ("replica", "shard")) if setting.hsdp else ((setting.ranks,), ("shard",))
    costs = replace(costs, links=links)
    return costs.among(fs.abstract_mesh(sizes, names))


def slower(link: Link, share: float) -> Link:
    """A link of a part of the rate: all that happens on the way takes as many times longer, latency included."""
    rates = {"bytes_per_s": link.bytes_per_s * share, "peak": link.peak * share}
    return replace(link, **rates, latency=link.latency / share)


def told(report: Report, models: Sequence[str]) -> None:
    """The rows of all pieces, and what is missing."""
    pieces = {key: report.medians[key] for key in wanted(models) if key in report.medians}
    report.rows = [row for key, piece in pieces.items() for row in rows(key, piece["cases"])]
    found = [error for piece in pieces.values() for error in errors(piece["cases"]).values()]
    choices = [value for piece in pieces.values() for value in regrets(piece["cases"]).values()]
    differ = [abs(case["halves"]) for piece in pieces.values() for case in piece["cases"].values()]
    if found:
        title = "all: how far predictions are from what was measured"
        median, worst = statistics.median(map(abs, found)), max(map(abs, found))
        report.rows += [Row(f"{title}, median", "share", median, target=MEDIAN)]
        report.rows += [Row(f"{title}, worst", "share", worst, target=WORST)]
        title = "all: how far the second half of the same steps is from the first"
        report.rows += [Row(f"{title}, median", "share", statistics.median(differ))]
        report.rows += [Row(f"{title}, worst", "share", max(differ))]
        title = "all: auto / best policy that fits"
        report.rows += [Row(f"{title}, median", "wall", statistics.median(choices), target=REGRET_MEDIAN)]
        report.rows += [Row(f"{title}, worst", "wall", max(choices), target=REGRET_WORST)]
    report.notes = [disturbance(pieces, len(wanted(models)))] if pieces else []


def disturbance(pieces: Mapping[str, Any], count: int) -> str:
    """When pieces were measured, how many of so many, and how disturbed they were."""
    disturbed = [piece["disturbed"] for piece in pieces.values()]
    dates = sorted(piece["date"] for piece in pieces.values())
    return (
        f"{len(pieces)} of {count} pieces are measured, from {dates[0]} to {dates[-1]}; half of all steps took "
        f"{min(disturbed):.2f} to {max(disturbed):.2f} times as long as those that count, by piece."
    )


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


def errors(cases: Mapping[str, Any]) -> dict[str, float]:
    """How far each prediction is from what was measured, but those of ``auto``, which is one of the policies."""
    given = {key: case for key, case in cases.items() if not key.rpartition("|")[2].startswith("auto")}
    return {key: case["predicted"] / case["measured"] - 1 for key, case in given.items()}


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
    cli.add_argument("--seconds", type=float, help="of the turns of a piece, instead of 90")
    cli.add_argument("--settings", type=int, nargs="+", help=f"numbers of settings, 0 to {len(SETTINGS) - 1}")
    cli.add_argument("--runs", type=Path, help="a folder that keeps what was measured, and is read where it has it")
    cli.add_argument("--tries", type=int, help="how often a disturbed piece is measured at most, instead of 3")
    cli.add_argument("--resume", action="store_true", help="keep the pieces that the results hold, and add others")
    cli.add_argument("--minutes", type=float, default=1e9, help="begin no piece later than this")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
