"""Pipelines: 1F1B on the GPT of 25 MB, against torch.distributed.pipelining with FSDP2 inside of each stage.

The claim: a pipeline takes no longer than PyTorch's, on 2 stages and on 2 stages of 2 shards, with the same cut and 8
microbatches. On a tiny GPT, where the host's work is most of a step, neither does a microbatch. One stage takes what
the same step takes without stages. The peak of the heap is that of the rank that has the most. Links need root
(``lab.py``). How long ranks idle in each order is another question: ``bubbles.py``.
"""

import argparse
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import lab
from common import Report, Row, arguments, ratio, run_workers
from memory import preloaded
from model import SMALL, TINY, Size

LOOPBACK = "loopback"
MICROBATCHES = 8
ORDERS = ("torch", "fshard", "fshard zb_h1", "fshard fx", "fshard fx zb_h1")
LAYOUTS = ((2, 2, ORDERS), (2, 4, ("torch", "fshard", "fshard kept")))
"""Stages, ranks and peers."""


def measure(args: argparse.Namespace) -> int:
    """Run the workers case by case, report."""
    why = lab.obstacle()
    rounds = args.rounds or (4 if args.quick else 20)
    asked = args.rates or ([LOOPBACK] if args.quick else [LOOPBACK, "1gbit"])
    rates = [rate for rate in asked if rate == LOOPBACK or not why]
    notes = [f"{', '.join(asked)}: skipped but for loopback: {why}"] if rates != asked else []
    small, tiny = replace(SMALL, batch=2 * MICROBATCHES), replace(TINY, batch=MICROBATCHES)
    configuration = {"model": asdict(small), "tiny": asdict(tiny), "microbatches": MICROBATCHES, "threads": 1}
    configuration |= {"rates": rates, "rounds": rounds}
    report = Report("pipeline", __doc__.splitlines()[0], configuration, notes=notes)
    if "steps" in args.parts:
        for rate in rates:
            for stages, ranks, names in LAYOUTS:
                steps(report, rate, small, stages, ranks, names, rounds)
    if "host" in args.parts:
        host(report, tiny, 4 * rounds)
    if "alone" in args.parts:
        alone(report, small, tiny, rounds)
    if "memory" in args.parts:
        peaks(report, small, 3 if args.quick else 9)
    return report.finish(args)


def run(
    size: Size, stages: int, ranks: int, names: Sequence[str], rounds: int, rate: str = LOOPBACK, **more: Any
) -> Any:
    """Run a case on every rank."""
    options = {"peers": names, "stages": stages, "rounds": rounds, "microbatches": MICROBATCHES, **asdict(size), **more}
    options.pop("vocabulary")
    return run_workers(ranks, None if rate == LOOPBACK else rate, options, "pipeline_rank.py")


def told(report: Report, title: str, samples: dict[str, Any]) -> None:
    """Keep the medians of a case."""
    report.medians[title] = {
        name: {kind: statistics.median(sample[kind]) for kind in ("wall", "cpu")} for name, sample in samples.items()
    }


def steps(report: Report, rate: str, size: Size, stages: int, ranks: int, names: Sequence[str], rounds: int) -> None:
    """Steps of the GPT."""
    samples = run(size, stages, ranks, names, rounds, rate)["samples"]
    title = f"{rate} {stages} stages x {ranks // stages}"
    told(report, title, samples)
    for name in names[1:]:
        for kind in ("wall", "cpu"):
            target = 1.0 if kind == "wall" else None
            words = f"{title}: {name} / {names[0]}"
            report.rows.append(ratio(words, kind, samples[name][kind], samples[names[0]][kind], target))


def host(report: Report, size: Size, rounds: int) -> None:
    """What more microbatches cost the host, on a tiny GPT: each has a forward and a backward on each stage."""
    found = {}
    for count in (MICROBATCHES, 2 * MICROBATCHES):
        options = {"microbatches": count}
        found[count] = run(replace(size, batch=count), 2, 2, ("torch", "fshard"), rounds, **options)["samples"]
        told(report, f"tiny, {count} microbatches", found[count])
        for kind in ("wall", "cpu"):
            pair = [found[count][name][kind] for name in ("fshard", "torch")]
            words = f"tiny, 2 stages, {count} microbatches: fshard / torch"
            report.rows.append(ratio(words, kind, *pair, 1.0 if kind == "cpu" else None))
    more = {name: _more(found, name) for name in ("fshard", "torch")}
    report.rows.append(
        Row("tiny, 2 stages, each microbatch more: fshard / torch", "cpu", more["fshard"] / more["torch"])
    )


def _more(found: dict[int, Any], name: str) -> float:
    """The CPU seconds of the microbatches that the larger step has more."""
    few, many = [statistics.median(found[count][name]["cpu"]) for count in sorted(found)]
    return many - few


def alone(report: Report, small: Size, tiny: Size, rounds: int) -> None:
    """One stage on one rank, against the same step without stages."""
    names = ("fshard without stages", "fshard")
    for title, size, count in (("25 MB", small, rounds), ("tiny", tiny, 4 * rounds)):
        samples = run(size, 1, 1, names, count)["samples"]
        told(report, f"{title}, one stage", samples)
        for kind in ("wall", "cpu"):
            pair = [samples[name][kind] for name in reversed(names)]
            report.rows.append(ratio(f"{title}, one stage / without stages", kind, *pair, 1.05))


def peaks(report: Report, size: Size, rounds: int) -> None:
    """The peak of the heap, of the rank that has the most."""
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        report.notes.append("memory: skipped: it needs Linux, and a C compiler named cc")
        return
    for stages, ranks, names in LAYOUTS:
        with preloaded():
            found = run(size, stages, ranks, names, rounds, memory=1)
        most = {name: max(rank[name] for rank in found) for name in names}
        title = f"{stages} stages x {ranks // stages}"
        report.medians[f"{title}, peak"] = found
        for name in names[1:]:
            report.rows.append(Row(f"{title}: {name} / torch", "heap", most[name] / most["torch"], target=1.0))


PARTS = ("steps", "host", "alone", "memory")


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="what is measured")
    cli.add_argument("--rates", nargs="+", help="of each rank's link, as tc reads it; loopback, and in full 1gbit")
    cli.add_argument("--rounds", type=int, help="steps of each peer")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
