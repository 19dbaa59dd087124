"""Memory: the most heap memory that a step needs above what is there between steps, on two ranks.

The claim: it is what fshard says beforehand, within 2 %; and at most 0.90 of FSDP2's at the same prefetch depth.

What counts: all that the C allocator has handed out, tensors and gloo's buffers alike, by glibc's own account
(``mallinfo2``), read after every PyTorch operation and, by a thread, while one blocks; fshard's accounts are not read.
(``torch.profiler`` would not do: it misses what gloo's threads release, which is where FSDP2's buffers often end.) The
peak is that of a step, above parameter shards and optimizer state; the median over some steps. fshard's arena stays
between steps, as do gradients that wait for their update: they count in full.

What is predicted: ``step.trace(batch).footprint``, made before anything runs: the arena, gradients and their
shards op by op, and the activations that fake tensors show. ``memory_kinds.py`` has the kinds of steps that are
held against their prediction alone; the limit of one of them is what ``fs.Auto`` must keep.
"""

import argparse
import ctypes
import gc
import json
import statistics
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import memory_kinds
import peers
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from model import SMALL, Size, loss_of, make, rows
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 1 << 20
PREDICTED = 1.02
PAIRS = (
    ("fshard", "fsdp2 prefetch 2"),
    ("fshard lean", "fsdp2 prefetch"),
    ("fshard no reshard", "fsdp2 no reshard"),
)
NAMES = tuple(dict.fromkeys(name for pair in PAIRS for name in pair))


FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()


class Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


LIBC = ctypes.CDLL(None)
if hasattr(LIBC, "mallinfo2"):
    LIBC.mallinfo2.restype = Heap


class Watch(TorchDispatchMode):
    """Keeps the most bytes that were in use after any operation, or at any look of a thread that looks all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, in_use())
        return result

    def _look(self) -> None:
        while not self.over.wait(0.0005):
            self.most = max(self.most, in_use())

    def close(self) -> None:
        """Stop looking."""
        self.over.set()
        self.thread.join()


def in_use() -> int:
    """Bytes that the C allocator has handed out, in its arenas and in maps of their own."""
    account = LIBC.mallinfo2()
    return int(account.uordblks + account.hblkhd)


def peaks(step: Callable[[], object], warm: int, steps: int) -> list[float]:
    """The most bytes in use during each of ``steps`` steps, above what is in use now; ``warm`` more go before them."""
    gc.collect()
    before, found = in_use(), []
    watch = Watch()
    with watch:
        for number in range(warm + steps):
            watch.most = 0
            step()
            if number >= warm:
                found.append(float(watch.most - before))
    watch.close()
    return found


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
        said = peer.train.trace(batch).footprint.peak_bytes
        return peaks(step, 2, steps), said
    step()
    return peaks(step, 1, steps), 0.0


def kind(name: str, size: Size, batch: torch.Tensor, steps: int) -> tuple[list[float], float, float | None]:
    """The peaks of steps of a kind, what was said of them, and their limit."""
    run, said, limit = memory_kinds.made(name, size, batch)
    return peaks(run, memory_kinds.SETTLED, steps), float(said()), limit


def work(args: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group():
        batch = rows(size, 0, dist.get_rank())
        peers.check_agreement(peers.build(NAMES, size), size)
        found = {name: above_resident(name, size, batch, args.steps) for name in NAMES}
        kinds = {name: kind(name, size, batch, args.steps) for name in memory_kinds.KINDS}
        if dist.get_rank() == 0:
            parameters = sum(p.nbytes for p in make(size).parameters())
            plain = activations(size, batch)
            args.out.write_text(
                json.dumps({"peaks": found, "kinds": kinds, "activations": plain, "parameters": parameters})
            )
        dist.barrier()
    return 0


def measure(args: argparse.Namespace) -> int:
    """Run the workers, report."""
    if not hasattr(LIBC, "mallinfo2"):
        print("memory: skipped: the C library has no mallinfo2, which glibc has since 2.33")
        return 0
    size = replace(SMALL, depth=4) if args.quick else SMALL
    report = Report("memory", __doc__.splitlines()[0], {"model": asdict(size), "ranks": 2, "rank reported": 0})
    options = {name: value for name, value in asdict(size).items() if name != "vocabulary"}
    steps = 5 if args.quick else 15
    report.configuration["steps"] = steps
    found = run_workers(2, None, {"worker": 1, "steps": steps, **options}, script="memory.py")
    plain = found["activations"]
    for ours, theirs in PAIRS:
        measured, predicted = found["peaks"][ours]
        expected = [predicted] * steps
        report.rows.append(ratio(f"{ours} / its prediction", "heap", measured, expected, PREDICTED))
        report.rows.append(ratio(f"prediction / {ours}", "heap", expected, measured, PREDICTED))
        report.rows.append(ratio(f"{ours} / {theirs}", "heap", measured, found["peaks"][theirs][0], 0.90))
    for name, (measured, predicted, limit) in found["kinds"].items():
        report.rows.append(ratio(f"{name} / its prediction", "heap", measured, [predicted] * steps, PREDICTED))
        report.rows.append(ratio(f"prediction / {name}", "heap", [predicted] * steps, measured, PREDICTED))
        if limit is not None:
            report.rows.append(ratio(f"{name} / the limit", "heap", measured, [limit] * steps, 1.0))
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
