"""One peer of ``gpu.py`` and ``gpu_ladder.py`` in its process: single steps, many between two waits, and kernels."""

import argparse
import json
import time
import warnings
from collections.abc import Iterable
from typing import Any

import gpu_peers
import silent
import torch
import torch.distributed as dist
from model import Size, make, rows
from torch.profiler import ProfilerActivity, profile
from turns import answering, serve

from fshard.sim import DEVICES

LARGE = Size(depth=24, width=2048, heads=16, tokens=1024, batch=4, vocabulary=32768)
"""1.34 billion parameters."""

DRY = Size(depth=2, width=32, heads=2, tokens=8, batch=2, vocabulary=64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.float32}
KINDS = {
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "mm_"),
    "attention": ("flash", "fmha", "sdpa", "cudnn"),
    "adamw": ("adam",),
    "copies": ("copy", "memcpy"),
    "norms": ("norm_", "normtwo", "reduce_kernel"),
    "nccl": ("nccl",),
}
"""Words in the names of kernels, by what they do; others are "other"."""

PROFILED, STEADY = 3, 10
"""Steps under the profiler, and between two waits for the device."""

Interval = tuple[float, float]


def exposed(intervals: Iterable[Interval]) -> tuple[float, float]:
    """The time from the first begin to the last end, and how much of it no interval covers."""
    ordered = sorted(intervals)
    if not ordered:
        return 0.0, 0.0
    idle, end = 0.0, ordered[0][1]
    for begin, over in ordered[1:]:
        idle += max(0.0, begin - end)
        end = max(end, over)
    return end - ordered[0][0], idle


def kind_of(kernel: str) -> str:
    """What a kernel does, by its name.

    >>> kind_of("sm90_xmma_gemm_bf16"), kind_of("ncclDevKernel_AllGather")
    ('products', 'nccl')
    """
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")


class Worker:
    """One peer.

    Args:
        name: of the peer.
        size: of the model.
        dtype: a key of ``DTYPES``.
        truth: of a silent group, to be filled; None if all ranks are there.
    """

    def __init__(self, name: str, size: Size, dtype: str, truth: silent.Truth | None = None) -> None:
        self.size, self.cuda = size, torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        with self.device:
            module = make(size).to(DTYPES[dtype])
        whole = {n: leaf.detach().cpu() for n, leaf in module.named_parameters()} if truth is not None else {}
        self.peer = gpu_peers.PEERS[form(name, dtype)](module)
        if truth is not None:
            truth.update(silent.truth_of(self.peer, whole))
        for leaf in module.parameters() if name.startswith("fshard") else ():
            leaf.untyped_storage().resize_(0)  # the state has a copy, and memory is compared

    def answer(self, what: str, number: int) -> dict[str, Any]:
        """A step, many steps, or steps under the profiler."""
        batch = rows(self.size, number).to(self.device)
        return {"steady": self.steady, "profile": self.profiled}.get(what, self.step)(batch)

    def step(self, batch: torch.Tensor) -> dict[str, Any]:
        """Seconds until the device is done; bytes allocated at most and before."""
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        wall, cpu = time.perf_counter(), time.process_time()
        self.peer.step(batch)
        self.wait()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = torch.cuda.max_memory_allocated() if self.cuda else 0
        found = {"wall": wall, "cpu": cpu, "loss": float(self.peer.loss), "peak": peak, "resident": before}
        # Of a peer that captures its steps: 1 if this one was replayed, 0 if it ran in another way.
        captures = isinstance(self.peer, gpu_peers.Captured)
        return found | ({"replayed": float(self.peer.ran == "replayed"), "ran": self.peer.ran} if captures else {})

    def steady(self, batch: torch.Tensor) -> dict[str, Any]:
        """Seconds of a step as in training, with no wait for the device between steps."""
        self.wait()
        begun = time.perf_counter()
        for _ in range(STEADY):
            self.peer.step(batch)
        self.wait()
        return {"wall": (time.perf_counter() - begun) / STEADY, "loss": float(self.peer.loss)}

    def profiled(self, batch: torch.Tensor) -> dict[str, Any]:
        """Seconds that the device's compute spans in a step, for how long of that no kernel ran, and its kernels."""
        self.wait()
        with profile(activities=[ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]) as seen:
            for _ in range(PROFILED):
                self.peer.step(batch)
            self.wait()
        device = torch.autograd.DeviceType.CUDA if self.cuda else torch.autograd.DeviceType.CPU
        # Ranges that code has named show on the device, too, and would cover the gaps in them.
        kernels = [e for e in seen.events() if e.device_type == device and not e.is_user_annotation]
        compute = [e for e in kernels if kind_of(e.name) != "nccl"]
        span, idle = exposed((e.time_range.start, e.time_range.end) for e in compute)
        spent: dict[str, float] = {}
        for event in kernels:
            took = (event.time_range.end - event.time_range.start) / 1e3 / PROFILED
            spent[kind_of(event.name)] = spent.get(kind_of(event.name), 0.0) + took
        unit = 1e6 * PROFILED
        return {"span": span / unit, "idle": idle / unit, "kernels": len(kernels) / PROFILED, "ms by kind": spent}

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize()


def form(name: str, dtype: str) -> str:
    """The name of a peer in a dtype."""
    return name + (" bf16" if dtype == "mixed" else "")


def join(world: int) -> silent.Truth | None:
    """Make the process group: of this rank alone, or of ranks that are not there, whose truth is returned."""
    if world > 1:
        return silent.join(world)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return None


def work(args: argparse.Namespace) -> int:
    """One peer of a case: join its group, build, obey."""
    warnings.simplefilter("ignore")
    answers = answering()
    truth = join(args.world)
    serve(Worker(args.peer, Size(**json.loads(args.size)), args.dtype, truth).answer, answers)
    dist.destroy_process_group()
    return 0


def flops(size: Size) -> float:
    """Floating-point operations of a step, as PaLM counts them (Chowdhery et al., 2022): 6 a parameter and token, and
    attention over all pairs of tokens. Embeddings are looked up, so they do not count.

    >>> f"{flops(LARGE):.3g}"
    '3.38e+13'
    """
    tokens, matrices = size.batch * size.tokens, 12 * size.depth * size.width**2 + size.width * size.vocabulary
    return float(tokens * (6 * matrices + 12 * size.depth * size.width * size.tokens))


def peak_rate(dtype: str) -> float | None:
    """What the GPU promises, in operations a second; None without a GPU, or if nothing is known of it."""
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    known = next((device for word, device in DEVICES.items() if word in name), None)
    return known and (known.flops32 if dtype == "fp32" else known.flops)
