"""Wire formats: the GPT of 25 MB over slow links with int8 both ways, HSDP with int4 or PowerSGD, and packing alone.

The claim: a step over a slow link takes the time of its bytes, and int8 has a quarter of float32's. Needs root for all
but packing: each rank, or each host of HSDP, gets a network namespace (``lab.py``).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import lab
import torch
from common import Report, Row, arguments, middle, ratio, run_workers
from model import SMALL
from peers import compiler_works

from fshard.runtime.comm.packing import Kernels, no_kernels, pack, packed, unpack, unpack_sum
from fshard.runtime.graphs.packing_kernels import PackingKernels
from fshard.sharding.wire import WireFormat

PEERS = ("fsdp2", "fsdp2 bf16", "fshard", "fshard int8")
HSDP = ("fsdp2 hsdp", "fshard hsdp", "fshard hsdp int4", "fshard hsdp powersgd")
CLAIMS = (
    ("fshard int8", "fsdp2", {("200mbit", 2): 0.30, ("200mbit", 4): 0.33, ("1gbit", 2): 0.42, ("1gbit", 4): 0.45}),
    ("fshard int8", "fsdp2 bf16", {("200mbit", 2): 0.60, ("200mbit", 4): 0.60}),
    ("fshard int8", "fshard", {}),
    ("fshard", "fsdp2", {}),
)
BYTES = 1.02
COPY = 2.0
"""Packing and unpacking may take twice the time of a copy each."""


def measure(args: argparse.Namespace) -> int:
    """Packing in this process, then the workers for each rate and number of ranks; report."""
    notes: list[str] = []
    rounds = args.rounds or (3 if args.quick else 5)
    configuration = {"model": asdict(SMALL), "rates": args.rates, "ranks": args.ranks, "threads": 1, "rounds": rounds}
    report = Report("formats", __doc__.splitlines()[0], configuration, notes=notes)
    torch.set_num_threads(1)
    for name in ("int8", "int4", "fp8_e4m3", "bf16"):
        packing(report, name, 20)
        summing(report, name, 20)
    why = compiler_works()
    notes += [f"compiled kernels: skipped: {why}"] if why else []
    for name in () if why else ("int8", "int4"):
        packing(report, f"{name}, compiled", 20, PackingKernels())
        summing(report, f"{name}, compiled", 20, PackingKernels())
    why = lab.obstacle()
    if why:
        notes.append(f"links: skipped: {why}")
        return report.finish(args)
    for rate in args.rates:
        for ranks in args.ranks:
            links(report, rate, ranks, workers(ranks, rate, PEERS, rounds, 1))
    replicas(report, "200mbit", workers(4, "200mbit", HSDP, rounds, 2))
    return report.finish(args)


def packing(report: Report, name: str, rounds: int, kernels: Kernels = no_kernels, numel: int = 6 << 20) -> None:
    """A format on one thread, against a copy of the same tensor in the same round."""
    form = WireFormat(name.partition(",")[0], 1 if name == "bf16" else 256)
    x, out = torch.randn(numel), torch.empty(numel)
    packed = torch.empty(form.nbytes(numel), dtype=torch.uint8)
    unpack(pack(x, form, packed, kernels), form, out, False, kernels)
    seconds: dict[str, list[float]] = {"copy": [], "packing": [], "unpacking": []}
    for _ in range(rounds):
        seconds["copy"].append(timed(lambda: out.copy_(x)))
        seconds["packing"].append(timed(lambda: pack(x, form, packed, kernels)))
        seconds["unpacking"].append(timed(lambda: unpack(packed, form, out, False, kernels)))
    for what, each in seconds.items():
        rates = [4e-9 * numel / second for second in each]
        report.rows.append(middle(f"{name}: {what}, one thread", "GB/s of float32", rates))
    for what in ("packing", "unpacking"):
        target = COPY if name == "int8, compiled" else None
        report.rows.append(ratio(f"{name}: {what} / a copy", "wall", seconds[what], seconds["copy"], target))


def summing(report: Report, name: str, rounds: int, kernels: Kernels = no_kernels, numel: int = 6 << 20) -> None:
    """The sum of rows of several ranks at once, against one row after the other, on one thread."""
    form = WireFormat(name.partition(",")[0], 1 if name == "bf16" else 256)
    rows, out = torch.stack([packed(torch.randn(numel), form) for _ in range(4)]), torch.empty(numel)

    def apart() -> None:
        for number, row in enumerate(rows):
            unpack(row, form, out, number > 0, kernels)

    ways = {"at once": lambda: unpack_sum(rows, form, out, False, kernels), "apart": apart}
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    for _ in range(rounds + 1):  # the first compiles
        for what, way in ways.items():
            seconds[what].append(timed(way))
    title = f"{name}: the sum of {len(rows)} rows at once / one after the other"
    report.rows.append(ratio(title, "wall", seconds["at once"][1:], seconds["apart"][1:]))


def timed(run: Callable[[], object]) -> float:
    """The seconds that a function takes."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def workers(ranks: int, rate: str, names: tuple[str, ...], rounds: int, together: int) -> Any:
    """What the workers of one rate and number of ranks have seen."""
    options = {"peers": names, "rounds": rounds, **asdict(SMALL), "count": 1}
    options.pop("vocabulary")
    return run_workers(ranks, rate, options, together=together)


def links(report: Report, rate: str, ranks: int, found: dict[str, Any]) -> None:
    """One rate, one number of ranks: times against the peers, bytes against the fewest of the format."""
    samples, title = medians(report, f"{rate} {ranks} ranks", found)
    for over, under, targets in CLAIMS:
        pair = samples[over]["wall"], samples[under]["wall"]
        report.rows.append(ratio(f"{title}: {over} / {under}", "wall", *pair, targets.get((rate, ranks))))
    for name in ("fshard", "fshard int8"):
        sent = statistics.median(samples[name]["sent"]) / found["minimum"][name]
        report.rows.append(Row(f"{title}: {name} / its minimum", "bytes", sent, target=BYTES))


def replicas(report: Report, rate: str, found: dict[str, Any]) -> None:
    """HSDP: only the axis between hosts is compressed."""
    samples, title = medians(report, f"HSDP, {rate} between hosts", found)
    for name, target in (("fshard hsdp", None), ("fshard hsdp int4", 0.5), ("fshard hsdp powersgd", None)):
        pair = samples[name]["wall"], samples["fsdp2 hsdp"]["wall"]
        report.rows.append(ratio(f"{title}: {name} / fsdp2 hsdp", "wall", *pair, target))
    exact = statistics.median(samples["fshard hsdp"]["sent"])
    for name in HSDP[2:]:
        sent = statistics.median(samples[name]["sent"])
        report.rows.append(Row(f"{title}: {name} / fshard hsdp", "bytes", sent / exact))


def medians(report: Report, title: str, found: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Note the medians of a case."""
    samples = found["samples"]
    report.medians[title] = {
        name: {kind: statistics.median(sample[kind]) for kind in sample} for name, sample in samples.items()
    }
    return samples, title


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    cli.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    cli.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"], help="of each rank's link, as tc reads it")
    cli.add_argument("--rounds", type=int, help="steps of each peer")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
