"""One GPU: a GPT of over 1B parameters, in one rank over NCCL, and a rank's own work in steps of 8 and 64 ranks.

The claim: sharding costs a GPU little. For many ranks PyTorch's *fake* process group stands in: collectives return at
once, so a step holds what the rank itself does, at its sizes of shards and buffers, and no communication. Peers: plain
PyTorch, the same under ``torch.compile``, FSDP2, and JAX.

Each peer has a process of its own, so that memory is its own. fshard and one other at a time take turns step by step.
Where there is no GPU nothing is measured; ``--cpu-dry-run`` runs all of this on a tiny model, to see that it works.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax_fsdp
import peers
import torch
import torch.distributed as dist
from common import HERE, QUICK, QUIET, Report, Row, arguments, ratio
from model import Size, make, rows
from torch.profiler import ProfilerActivity, profile
from turns import Family, answering, serve

LARGE = Size(depth=24, width=2048, heads=16, tokens=1024, batch=4, vocabulary=32768)
"""1.34 billion parameters."""

HOST = Size(depth=24, width=64, heads=2, tokens=16, batch=1, vocabulary=64)
"""As many units, and so little work in each that the host's time is what passes."""

DRY = Size(depth=2, width=32, heads=2, tokens=8, batch=2, vocabulary=64)
CASES = {1: ("eager", "compiled", "fsdp2", "jax"), 8: ("fsdp2", "fsdp2 async"), 64: ("fsdp2",)}
"""Whom fshard meets, by the number of ranks."""

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "mixed": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "mixed": torch.float32}
MIXED = "of everything; mixed: parameters and optimizer state in fp32, compute and communication in bf16"
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


class Worker:
    """One peer in its process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.size, self.cuda = Size(**json.loads(args.size)), torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        with self.device:
            module = make(self.size).to(DTYPES[args.dtype])
        self.peer = peers.PEERS[args.peer + (" bf16" if args.dtype == "mixed" else "")](module)

    def answer(self, what: str, number: int) -> dict[str, Any]:
        """A step, or a step under the profiler."""
        batch = rows(self.size, number).to(self.device)
        return self.profiled(batch) if what == "profile" else self.step(batch)

    def step(self, batch: torch.Tensor) -> dict[str, float]:
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
        return {"wall": wall, "cpu": cpu, "loss": float(self.peer.loss), "peak": peak, "resident": before}

    def profiled(self, batch: torch.Tensor) -> dict[str, float]:
        """Seconds that the device's compute spans in a step, and for how long of that no kernel ran."""
        kind = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        self.wait()
        with profile(activities=[kind]) as seen:
            self.peer.step(batch)
            self.wait()
        device = torch.autograd.DeviceType.CUDA if self.cuda else torch.autograd.DeviceType.CPU
        kernels = [event for event in seen.events() if event.device_type == device and "nccl" not in event.name.lower()]
        span, idle = exposed((event.time_range.start, event.time_range.end) for event in kernels)
        return {"span": span / 1e6, "idle": idle / 1e6}

    def wait(self) -> None:
        """Until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize()


def work(args: argparse.Namespace) -> int:
    """One peer: join the group of its case, build, obey."""
    warnings.simplefilter("ignore")
    answers = answering()
    if args.world == 1:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world)
    serve(Worker(args).answer, answers)
    dist.destroy_process_group()
    return 0


def command(name: str, size: Size, world: int, dtype: str, data: Path) -> list[str]:
    """What starts a peer."""
    if name == "jax":
        platform = "cuda" if torch.cuda.is_available() else "cpu"
        return jax_fsdp.jax_command(data, size, {"dtype": dtype}, platform)
    words = {"worker": 1, "peer": name, "size": json.dumps(asdict(size)), "world": world, "dtype": dtype}
    return [sys.executable, str(HERE / "gpu.py"), *(w for k, v in words.items() for w in (f"--{k}", str(v)))]


def meet(names: tuple[str, str], size: Size, world: int, dtype: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Two peers in turns: samples by peer and measure, and one profiled step of each that has a profiler."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder) / "data.npz"
        if "jax" in names:
            jax_fsdp.write_data(data, size, 1, rounds + 3)
        families = {
            name: stack.enter_context(Family(name, [command(name, size, world, dtype, data)], around(name)))
            for name in names
        }
        if world == 1:
            jax_fsdp.check(families, TOLERANCE[dtype], numbers=range(2))
        samples: dict[str, dict[str, Any]] = {name: {} for name in names}
        for number in range(-1, rounds):
            for name in names if number % 2 else names[::-1]:
                (found,) = families[name].ask(f"step step {number + 3}")
                for kind, value in found.items() if number >= 0 else ():
                    samples[name].setdefault(kind, []).append(value)
        for name in names:
            if name != "jax":
                samples[name]["profile"] = families[name].ask("step profile 0")[0]
    return samples


def around(name: str) -> dict[str, str]:
    """A peer's environment. JAX would take most of the memory at once, and leave none to the other."""
    if name == "jax":
        return {**jax_fsdp.JAX, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**QUIET, "OMP_NUM_THREADS": "1"}


def case(report: Report, world: int, other: str, sizes: tuple[Size, Size], dtype: str, rounds: int) -> None:
    """fshard against one other: time, memory, gaps at the large size, the host's time at the small one."""
    large, small = sizes
    title = f"{world} rank{'s, faked' if world > 1 else ''}"
    samples = meet(("fshard", other), large, world, dtype, rounds)
    ours, theirs = samples["fshard"], samples[other]
    report.rows.append(ratio(f"{title}: fshard / {other}", "wall", ours["wall"], theirs["wall"]))
    if any(theirs.get("peak", ())) and any(ours["peak"]):
        report.rows.append(ratio(f"{title}: fshard / {other}", "peak memory", ours["peak"], theirs["peak"]))
    for name, sample in samples.items():
        if sample.get("profile", {}).get("span"):
            share = sample["profile"]["idle"] / sample["profile"]["span"]
            report.rows.append(Row(f"{title}: {name}, against {other}", "idle share", share))
    hosts = meet(("fshard", other), small, world, dtype, 3 * rounds)
    report.rows.append(ratio(f"{title}: fshard / {other}", "host", hosts["fshard"]["wall"], hosts[other]["wall"]))
    for name, sample in hosts.items():
        unit = 1e6 * statistics.median(sample["wall"]) / small.depth
        report.rows.append(Row(f"{title}: {name}, against {other}", "host µs a unit", unit))
    report.medians[f"{title}, {other}"] = {
        name: {kind: statistics.median(values) for kind, values in sample.items() if isinstance(values, list)}
        for name, sample in samples.items()
    }


def missing(name: str, dry: bool) -> str | None:
    """Why there is no such peer here, or None."""
    if name != "jax":
        return peers.obstacle(name)
    why = jax_fsdp.obstacle()
    return why if why or dry else jax_fsdp.no_gpu()


def measure(args: argparse.Namespace) -> int:
    """All cases, or the message that there is no GPU."""
    if not torch.cuda.is_available() and not args.cpu_dry_run:
        print("gpu: skipped: no GPU at hand, so nothing was measured; --cpu-dry-run runs the code on a tiny model")
        return 0
    dry = args.cpu_dry_run
    size = DRY if dry else replace(LARGE, depth=args.depth or LARGE.depth)
    rounds = args.rounds or (2 if dry else 5 if args.quick else 15)
    configuration = {"model": asdict(size), "dtype": args.dtype, "rounds": rounds, "dry run on CPU": dry}
    claim = f"Dry run on CPU, figures without meaning. {__doc__.splitlines()[0]}" if dry else __doc__.splitlines()[0]
    report = Report("gpu_dry_run" if dry else "gpu", claim, configuration)
    report.environment["device"] = "cpu" if dry else torch.cuda.get_device_name()
    args.results = args.results or (QUICK if dry else None)
    for world, others in CASES.items():
        if world > 1 and dry and args.dtype == "mixed":
            report.notes.append(f"{world} ranks, faked: skipped: rounded gradients need a GPU there")
            continue
        for other in others:
            why = missing(other, dry)
            if why:
                report.notes.append(f"{other}: skipped: {why}")
            elif other in (args.peers or others):
                case(report, world, other, (size, DRY if dry else HOST), args.dtype, rounds)
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen, and what a worker is told."""
    cli.add_argument("--cpu-dry-run", action="store_true", help="run the code on a tiny model, without a GPU")
    cli.add_argument("--rounds", type=int, help="steps of each peer")
    cli.add_argument("--depth", type=int, help="blocks, instead of the benchmark's own")
    cli.add_argument("--dtype", choices=DTYPES, default="bf16", help=MIXED)
    cli.add_argument("--peers", nargs="+", metavar="NAME", help="whom fshard meets, instead of all")
    for name, kind in (("worker", int), ("world", int), ("peer", str), ("size", str)):
        cli.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    run: Callable[[argparse.Namespace], int] = work if given.worker else measure
    sys.exit(run(given))
