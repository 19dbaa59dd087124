"""Memory: the most that a step needs above what is there between steps, on two ranks.

The claim: tensors take what fshard says beforehand, within 1 %; and all of the heap at most 0.90 of FSDP2's at the same
prefetch depth.

What counts is the heap: all that the C allocator has handed out. ``tensors.c`` is preloaded and sees each block come
and go, whichever thread it is, also in the middle of an operator; fshard's accounts are not read. Tensors are the
blocks that are aligned, as PyTorch's allocator asks for them. (``torch.profiler`` would not do: it misses what gloo's
threads release, which is where FSDP2's buffers often end. Nor would looking after each operator: unit graphs do not run
where a mode looks on.) The peak is that of a step, above parameter shards and optimizer state; the median over some
steps. fshard's arena stays between steps, as do gradients that wait for their update: they count in full. Each kind of
step has a twin before it in the process: what is made once, such as the kernels that oneDNN compiles for bfloat16, is
not of the step.

What is predicted: ``step.trace(batch).footprint``, made before anything runs: the arena, gradients and their
shards op by op, and the activations that fake tensors show. ``memory_kinds.py`` has the kinds of steps that are
held against their prediction alone; the limit of one of them is what ``fs.Auto`` must keep. Activations that go to
the host are in no number (``hosted.py``).
"""

import argparse
import ctypes
import functools
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import hosted
import memory_kinds
import peers
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from model import SMALL, Size, loss_of, make, rows
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 1 << 20
PREDICTED = 1.01
PAIRS = (
    ("fshard", "fsdp2 prefetch 2"),
    ("fshard lean", "fsdp2 prefetch"),
    ("fshard no reshard", "fsdp2 no reshard"),
)
HOSTED = (
    (("kinds", "chunked logits"), ("kinds", "whole logits")),
    (("kinds", "kept"), ("peaks", "fsdp2, kept")),
    (("kinds", "offloaded"), ("kinds", "kept")),
    (("peaks", "fsdp2 save_on_cpu"), ("peaks", "fsdp2, kept")),
    (("kinds", "offloaded"), ("peaks", "fsdp2 save_on_cpu")),
)
"""Logits by chunks beside whole ones; and steps of many rows, whose activations stay or go to the host. FSDP2 fetches
each tensor where it is used, and saves gathered weights, too: it holds less, and waits for each copy."""

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


@functools.cache
def counter() -> ctypes.CDLL:
    """The functions of ``tensors.c``, which is preloaded."""
    found = ctypes.CDLL(None)
    for name in ("tensor_bytes", "heap_bytes", "tensor_peak", "heap_peak"):
        getattr(found, name).restype = ctypes.c_long
    return found


Peak = tuple[float, float]
"""The most bytes of tensors, and of all of the heap, above what was in use before."""


def peaks(step: Callable[[], object], warm: int, steps: int) -> list[Peak]:
    """The peaks of ``steps`` steps; ``warm`` more go before them."""
    count, found = counter(), []
    gc.collect()
    tensors, heap = count.tensor_bytes(), count.heap_bytes()
    for number in range(warm + steps):
        count.forget_peaks()
        step()
        if number >= warm:
            found.append((float(count.tensor_peak() - tensors), float(count.heap_peak() - heap)))
    return found


def activations(size: Size, batch: torch.Tensor) -> float:
    """The peak of a plain eager step above parameters and gradients."""
    module = make(size)

    def step() -> None:
        loss_of(module(batch[:, :-1]), batch).backward()

    step()
    return statistics.median([tensors for tensors, _ in peaks(step, 0, 3)])


def above_resident(name: str, size: Size, batch: torch.Tensor, steps: int) -> tuple[list[Peak], float]:
    """The peaks of steps of a peer, and what its schedule says of them (0 for those that have none)."""
    peer = peers.build([name], size)[name]

    def step() -> None:
        peer.step(batch)

    if isinstance(peer, peers.Fshard):
        said = peer.train.trace(batch).footprint.peak_bytes
        return peaks(step, 2, steps), said
    step()
    return peaks(step, 1, steps), 0.0


def others(peer: peers.Peer, batch: torch.Tensor, steps: int) -> list[Peak]:
    """The peaks of steps of a peer on a batch."""

    def step() -> None:
        peer.step(batch)

    step()
    return peaks(step, 1, steps)


def kind(name: str, size: Size, batch: torch.Tensor, steps: int) -> tuple[list[Peak], float, float | None]:
    """The peaks of steps of a kind, what was said of them, and their limit."""
    twin, _, _ = memory_kinds.made(name, size, batch)
    for _ in range(memory_kinds.warm(name)):
        twin()
    del twin
    run, said, limit = memory_kinds.made(name, size, batch)
    return peaks(run, memory_kinds.warm(name), steps), float(said()), limit


def work(args: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group(), hosted.on_the_host():
        batch = rows(size, 0, dist.get_rank())
        peers.check_agreement(peers.build(NAMES, size), size)
        found = {name: above_resident(name, size, batch, args.steps) for name in NAMES}
        kinds = {name: kind(name, size, batch, args.steps) for name in memory_kinds.KINDS}
        many = batch.repeat(memory_kinds.ROWS, 1)
        found |= {name: (others(peer, many, args.steps), 0.0) for name, peer in hosted.others(size).items()}
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
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        print("memory: skipped: it needs Linux, and a C compiler named cc")
        return 0
    size = replace(SMALL, depth=4) if args.quick else SMALL
    report = Report("memory", __doc__.splitlines()[0], {"model": asdict(size), "ranks": 2, "rank reported": 0})
    options = {name: value for name, value in asdict(size).items() if name != "vocabulary"}
    steps = 5 if args.quick else 15
    report.configuration["steps"] = steps
    with preloaded():
        found = run_workers(2, None, {"worker": 1, "steps": steps, **options}, script="memory.py", timeout=3600)
    plain = found["activations"]
    for ours, theirs in PAIRS:
        measured, predicted = found["peaks"][ours]
        report.rows += predictions(ours, measured, predicted)
        heaps = [[heap for _, heap in found["peaks"][name][0]] for name in (ours, theirs)]
        report.rows.append(ratio(f"{ours} / {theirs}", "heap", *heaps, 0.90))
    for name, (measured, predicted, limit) in found["kinds"].items():
        report.rows += predictions(name, measured, predicted)
        if limit is not None:
            report.rows.append(ratio(f"{name} / the limit", "tensors", firsts(measured), [limit] * steps, 1.0))
    for ours, theirs in HOSTED:
        first, second = ([heap for _, heap in found[of][name][0]] for of, name in (ours, theirs))
        report.rows.append(ratio(f"{ours[1]} / {theirs[1]}", "heap", first, second))
    for name, (measured, _) in found["peaks"].items():
        report.rows.append(middle(name, "MiB", [heap / MIB for _, heap in measured]))
    report.rows.append(Row("activations of plain PyTorch", "MiB", plain / MIB))
    report.rows.append(Row("all parameters", "MiB", found["parameters"] / MIB))
    report.medians = found
    return report.finish(args)


def predictions(name: str, measured: Sequence[Peak], predicted: float) -> list[Row]:
    """What was measured to what was said, and the other way round."""
    tensors, said = firsts(measured), [predicted] * len(measured)
    return [
        ratio(f"{name} / its prediction", "tensors", tensors, said, PREDICTED),
        ratio(f"prediction / {name}", "tensors", said, tensors, PREDICTED),
    ]


def firsts(measured: Sequence[Peak]) -> list[float]:
    """Of tensors alone."""
    return [tensors for tensors, _ in measured]


@contextmanager
def preloaded() -> Iterator[None]:
    """Processes that start inside count the bytes of tensors."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "tensors.so"
        source = Path(__file__).with_name("tensors.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        with mock.patch.dict(os.environ, LD_PRELOAD=str(library)):
            yield


def options(cli: argparse.ArgumentParser) -> None:
    """What a worker is told."""
    for name in ("worker", "steps", "depth", "width", "heads", "tokens", "batch"):
        cli.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    cli.add_argument("--out", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    sys.exit(work(given) if given.worker else measure(given))
