"""HSDP: 2 hosts of 2 ranks, a fast link inside of each host and a slow one between them, against FSDP2's HSDP.

The claim: parameters are sharded inside of a host and replicated over hosts, and the sum over replicas, all that takes
the slow link, is under way while others gather, reduce and compute. Needs root: each host gets a network namespace, in
which its ranks talk over loopback; fshard goes through shared memory there, as it does on any host.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import lab
import peers
from common import RESULTS, Report, Row, arguments, peers_option, ratio, run_workers
from model import SMALL

from fshard.schedule import parse
from fshard.schedule.simulate import Simulation, covered, measured
from fshard.schedule.transfers import awaited

SHARDED = ("fshard hosts", "fshard hosts secondary")
ACROSS = 1.02
"""Of the fewest bytes between hosts: gathers of the forward, and reductions."""
PEERS = ("fsdp2 hsdp", "fshard hsdp", "fshard hsdp parted")
TARGETS = {"1gbit": 0.6}
"""By rate; at 200 Mbit/s the bytes alone take 0.66 of FSDP2's step."""
RANKS, TOGETHER = 4, 2
PICTURES = RESULTS.parent.parent / "docs" / "pictures"


def measure(args: argparse.Namespace) -> int:
    """Run the workers for each rate, report."""
    why = lab.obstacle()
    if why:
        print(f"hsdp: skipped: {why}")
        return 0
    notes: list[str] = []
    names = peers.select(args.peers or PEERS, notes)
    rounds = args.rounds or (3 if args.quick else 8)
    links = {"between hosts": args.rates, "inside": "loopback, shared memory"}
    configuration = {"model": asdict(SMALL), "ranks": RANKS, "together": TOGETHER, "links": links, "rounds": rounds}
    report = Report("hsdp", __doc__.splitlines()[0], {**configuration, "peers": names}, notes=notes)
    for rate in args.rates:
        options = {"peers": names, "rounds": rounds, **asdict(SMALL)}
        options.pop("vocabulary")
        found = run_workers(RANKS, rate, options, "hsdp_rank.py", together=TOGETHER)
        case(report, rate, found)
        if args.picture:
            draw(found["watched"][0], rate)
    options = {"peers": SHARDED, "rounds": rounds, **asdict(SMALL), "count": 1}
    options.pop("vocabulary")
    across(report, args.rates[-1], run_workers(RANKS, args.rates[-1], options, together=TOGETHER))
    return report.finish(args)


def across(report: Report, rate: str, found: dict[str, Any]) -> None:
    """Parameters that are sharded over hosts too: what crosses the link with and without secondary shards."""
    samples, title = found["samples"], f"{rate} between hosts, sharded over all ranks"
    report.medians[title] = {
        name: {kind: statistics.median(sample[kind]) for kind in sample} for name, sample in samples.items()
    }
    for name, target in zip(SHARDED, (None, ACROSS), strict=True):
        sent = statistics.median(samples[name]["sent"]) / found["across"][name]
        report.rows.append(Row(f"{title}: {name} / one gather and one reduction", "bytes", sent, target=target))
    pair = samples[SHARDED[1]]["wall"], samples[SHARDED[0]]["wall"]
    report.rows.append(ratio(f"{title}: {SHARDED[1]} / {SHARDED[0]}", "wall", *pair))


def case(report: Report, rate: str, found: dict[str, Any]) -> None:
    """One rate."""
    samples, title = found["samples"], f"{rate} between hosts"
    report.medians[title] = {
        name: {kind: statistics.median(sample[kind]) for kind in sample} for name, sample in samples.items()
    }
    for name in samples:
        if name != "fsdp2 hsdp" and "fsdp2 hsdp" in samples:
            pair = samples[name]["wall"], samples["fsdp2 hsdp"]["wall"]
            report.rows.append(ratio(f"{title}: {name} / fsdp2 hsdp", "wall", *pair, TARGETS.get(rate)))
    run = run_of(found["watched"][0])
    if "fsdp2 hsdp" in samples:
        alone = [link_seconds(run, rate)] * len(samples["fsdp2 hsdp"]["wall"])
        report.rows.append(
            ratio(f"{title}: the bytes alone / fsdp2 hsdp", "wall", alone, samples["fsdp2 hsdp"]["wall"])
        )
    for name, share in overlap(run).items():
        report.rows.append(Row(f"{title}: sums over replicas, {name}", "share", share))


def run_of(watched: dict[str, Any]) -> Simulation:
    """What a rank did in its watched step."""
    arrivals = {int(at): (begin, end) for at, (begin, end) in watched["arrivals"].items()}
    return measured(parse(watched["schedule"]), watched["times"], arrivals)


def link_seconds(run: Simulation, rate: str) -> float:
    """How long the sums over replicas take the link of a host, whatever the order: each rank sends its shards once."""
    sent = {op.target for op in run.schedule if op.kind == "replica_reduce"}
    shards = sum(group.shard_bytes for group in run.schedule.groups if group.name in sent)
    unit = next(unit for unit in ("gbit", "mbit") if rate.endswith(unit))
    bits = float(rate.removesuffix(unit)) * {"gbit": 1e9, "mbit": 1e6}[unit]
    return 8 * TOGETHER * shards / bits


def overlap(run: Simulation) -> dict[str, float]:
    """The share of the time in which sums over replicas are under way, that gathers and reductions are, too, and
    that the rank does not wait; and the share of the step in which the rank waits for sums alone."""
    spans: dict[str, list[tuple[float, float]]] = {}
    waits, totals = [], []
    for op, issued, begin, end in zip(run.schedule, run.issued, run.starts, run.ends, strict=True):
        spans.setdefault(op.kind, []).append((begin, end))
        if awaited(op.kind):
            waits.append((issued, end))
        if op.kind == "wait replica_reduce":
            totals.append((issued, end))
    sums = spans.get("replica_reduce", [])
    gathers, reductions = spans.get("all_gather", []), spans.get("reduce_scatter", [])
    under_way = covered(sums)
    if not under_way:
        return {}
    return {
        "beside gathers or reductions": together(sums, gathers + reductions) / under_way,
        "beside reductions": together(sums, reductions) / under_way,
        "beside gathers": together(sums, gathers) / under_way,
        "beside compute": 1 - together(sums, waits) / under_way,
        "waited for, of the step": covered(totals) / run.seconds,
    }


def together(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """The time in which at least one span of each kind is under way."""
    return covered(first) + covered(second) - covered([*first, *second])


def draw(watched: dict[str, Any], rate: str) -> None:
    """The watched step as a picture."""
    from fshard.view import timeline

    run = run_of(watched)
    PICTURES.mkdir(exist_ok=True)
    timeline(run.schedule, run).savefig(PICTURES / f"hsdp-{rate}.png", dpi=80)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen."""
    peers_option(cli)
    cli.add_argument("--rates", nargs="+", default=["1gbit", "200mbit"], help="of the hosts' links, as tc reads them")
    cli.add_argument("--rounds", type=int, help="steps of each peer")
    cli.add_argument("--picture", action="store_true", help="draw the watched step into docs/pictures")


if __name__ == "__main__":
    sys.exit(measure(arguments(__doc__, options)))
