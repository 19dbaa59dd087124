"""Memory: the most tensor memory that a step needs above what is there between steps, on two ranks.

The claim: it is what the schedule says, plus the activations that plain PyTorch needs; and at most 0.90 of FSDP2's at
the same prefetch depth.

What counts: every allocation and release of PyTorch's CPU allocator, as ``torch.profiler`` reports them; fshard's own
accounts are not read. The peak is that of a step, above parameter shards and optimizer state; the median over some
steps, since FSDP2 releases some buffers when gloo's threads get to it. fshard's arena and gradient shards stay between
steps, and count in full.

What is predicted: the arena that the schedule packs, a gradient shard for each group, and the *activations of plain
PyTorch*: the peak of an eager step of the same model and rows above its parameters, optimizer state and gradients,
all gradients being there already.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from model import SMALL, Size, loss_of, make, rows
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

MARK = 1_000_003
"""Bytes of an allocation that marks a place in the record: no other has this size."""

MIB = 1 << 20
PREDICTED = 1.05
PAIRS = (
    ("fshard", "fsdp2 prefetch"),
    ("fshard one reduce", "fsdp2 prefetch"),
    ("fshard no reshard", "fsdp2 no reshard"),
)
NAMES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))


def peaks(step: Callable[[], object], warm: int, steps: int) -> list[float]:
    """The most bytes alive during each of ``steps`` steps, above what is alive now; ``warm`` more go before them."""
    with quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        torch.empty(MARK, dtype=torch.uint8)
        for _ in range(warm):
            step()
        for _ in range(steps):
            torch.empty(MARK, dtype=torch.uint8)
            step()
        torch.empty(MARK, dtype=torch.uint8)
    sizes, totals = zip(*allocations(record), strict=True)
    marks = [i for i, size in enumerate(sizes) if size == MARK]
    before = totals[marks[0]] - MARK
    # The two entries at a mark are its own allocation and release.
    spans = zip(marks[1:], marks[2:], strict=False)
    return [float(max(totals[first + 2 : last]) - before) for first, last in spans]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what C++ writes to the standard error: the profiler announces each start and stop there."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def allocations(record: Any) -> list[tuple[int, int]]:
    """What was allocated (released, if negative), and the bytes alive after it, in order of time."""

    def walk(events: list[Any]) -> Iterator[Any]:
        for event in events:
            yield event
            yield from walk(event.children)

    tree = record.profiler.kineto_results.experimental_event_tree()
    found = [event for event in walk(tree) if event.typed[0] == _EventType.Allocation]
    found.sort(key=lambda event: event.start_time_ns)
    return [(event.typed[1].alloc_size, event.typed[1].total_allocated) for event in found]


def activations(size: Size, batch: torch.Tensor) -> float:
    """The peak of a plain eager step above parameters and gradients."""
    module = make(size)

    def step() -> None:
        loss_of(module(batch[:, :-1]), batch).backward()

    step()
    return statistics.median(peaks(step, 0, 3))


def above_resident(name: str, size: Size, batch: torch.Tensor, steps: int) -> tuple[list[float], float]:
    """The peaks of steps of a peer, and what its schedule says of them (0 for those that have none)."""
    peer = peers.build([name], size)[name]

    def step() -> None:
        peer.step(batch)

    if isinstance(peer, peers.Fshard):
        peer.train.trace(batch)
        found = peaks(step, 2, steps)
        shards = sum(group.chunk * group.dtype.itemsize for group in peer.plan.groups if group.trainable)
        return found, peer.train.schedule.memory.arena_bytes + shards
    step()
    return peaks(step, 1, steps), 0.0


def work(args: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group():
        batch = rows(size, 0, dist.get_rank())
        peers.check_agreement(peers.build(NAMES, size), size)
        found = {name: above_resident(name, size, batch, args.steps) for name in NAMES}
        if dist.get_rank() == 0:
            parameters = sum(p.nbytes for p in make(size).parameters())
            plain = activations(size, batch)
            args.out.write_text(json.dumps({"peaks": found, "activations": plain, "parameters": parameters}))
        dist.barrier()
    return 0


def measure(args: argparse.Namespace) -> int:
    """Run the workers, report."""
    size = replace(SMALL, depth=4) if args.quick else SMALL
    report = Report("memory", __doc__.splitlines()[0], {"model": asdict(size), "ranks": 2, "rank reported": 0})
    options = {name: value for name, value in asdict(size).items() if name != "vocabulary"}
    steps = 5 if args.quick else 15
    report.configuration["steps"] = steps
    found = run_workers(2, None, {"worker": 1, "steps": steps, **options}, script="memory.py")
    plain = found["activations"]
    for ours, theirs in PAIRS:
        measured, predicted = found["peaks"][ours]
        expected = [predicted + plain] * steps
        report.rows.append(ratio(f"{ours} / its prediction", "bytes", measured, expected, PREDICTED))
        report.rows.append(ratio(f"{ours} / {theirs}", "bytes", measured, found["peaks"][theirs][0], 0.90))
    for name, (measured, _) in found["peaks"].items():
        report.rows.append(middle(name, "MiB", [value / MIB for value in measured]))
    report.rows.append(Row("activations of plain PyTorch", "MiB", plain / MIB))
    report.rows.append(Row("all parameters", "MiB", found["parameters"] / MIB))
    report.medians = found
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What a worker is told."""
    for name in ("worker", "steps", "depth", "width", "heads", "tokens", "batch"):
        cli.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    cli.add_argument("--out", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    sys.exit(work(given) if given.worker else measure(given))
