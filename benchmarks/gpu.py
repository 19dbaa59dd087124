"""One GPU: a GPT of over 1B parameters, in one rank over NCCL, and a rank's own work in steps of 8 and 64 ranks.

The claim: sharding costs a GPU little. For many ranks PyTorch's *fake* process group stands in: collectives return at
once, so a step holds what the rank itself does, at its sizes of shards and buffers, and no communication. Peers: plain
PyTorch, the same under ``torch.compile``, FSDP2, and JAX.

Each peer has a process of its own, so that memory is its own. fshard and one other at a time take turns step by step.
Results are written after each case, so that a run that is cut keeps what it has; a case that fails leaves a note. Where
there is no GPU nothing is measured; ``--cpu-dry-run`` runs all of this on a tiny model, to see that it works.
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

import gpu_peers
import jax_fsdp
import silent
import torch
import torch.distributed as dist
from common import HERE, QUICK, QUIET, Report, Row, arguments, ratio
from model import Size, make, rows
from torch.profiler import ProfilerActivity, profile
from turns import Family, answering, serve

from fshard.sim import DEVICES

LARGE = Size(depth=24, width=2048, heads=16, tokens=1024, batch=4, vocabulary=32768)
"""1.34 billion parameters."""

HOST = Size(depth=12, width=64, heads=2, tokens=16, batch=1, vocabulary=64)
"""So little work in each unit that the host's time is what passes."""

DRY = Size(depth=2, width=32, heads=2, tokens=8, batch=2, vocabulary=64)
CASES = (
    "1 eager",
    "1 fshard inductor / compiled loss",
    "1 fshard inductor / fsdp2 titan",
    "1 fshard inductor graph / compiled loss",
    "1 fshard graph / compiled graphs",
    "1 fshard fx / eager",
    "1 fshard inductor clip / compiled clip",
    "1 fsdp2",
    "8 fsdp2",
    "64 fsdp2",
    "1 compiled",
    "1 jax",
    "8 fsdp2 async",
)
"""The number of ranks and two peers, or whom fshard meets: first what matters most, since time may run out."""

WARM, ANSWER = 2, 150.0
"""Rounds before the first that counts, and seconds for one answer: a first step may compile."""

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
        self.peer = gpu_peers.PEERS[args.peer + (" bf16" if args.dtype == "mixed" else "")](module)
        for leaf in module.parameters() if args.peer.startswith("fshard") else ():
            leaf.untyped_storage().resize_(0)  # the state has a copy, and memory is compared

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
        return {
            "wall": wall,
            "cpu": cpu,
            "loss": float(self.peer.loss),
            "peak": peak,
            "resident": before,
            **self.replayed(),
        }

    def replayed(self) -> dict[str, float]:
        """Of a peer that captures its steps: 1 if the latest one was replayed, 0 if it ran in another way."""
        return {"replayed": float(self.peer.ran == "replayed")} if isinstance(self.peer, gpu_peers.Captured) else {}

    def profiled(self, batch: torch.Tensor) -> dict[str, float]:
        """Seconds that the device's compute spans in a step, and for how long of that no kernel ran."""
        kind = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        self.wait()
        with profile(activities=[kind]) as seen:
            self.peer.step(batch)
            self.wait()
        device = torch.autograd.DeviceType.CUDA if self.cuda else torch.autograd.DeviceType.CPU
        # Ranges that code has named show on the device, too, and would cover the gaps in them.
        kernels = [
            event
            for event in seen.events()
            if event.device_type == device and not event.is_user_annotation and "nccl" not in event.name.lower()
        ]
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
        silent.join(args.world)
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
            jax_fsdp.write_data(data, size, 1, rounds + WARM + 2, "cuda" if torch.cuda.is_available() else "cpu")
        families = {
            name: stack.enter_context(Family(name, [command(name, size, world, dtype, data)], around(name), ANSWER))
            for name in names
        }
        if world == 1:
            jax_fsdp.check(families, TOLERANCE[dtype], numbers=range(2))
        samples: dict[str, dict[str, Any]] = {name: {} for name in names}
        for number in range(-WARM, rounds):
            for name in names if number % 2 else names[::-1]:
                (found,) = families[name].ask(f"step step {number + WARM + 2}")
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


def case(report: Report, world: int, names: tuple[str, str], sizes: tuple[Size, Size], dtype: str, rounds: int) -> None:
    """One against another: time, memory, gaps at the large size, the host's time at the small one."""
    (large, small), (own, other) = sizes, names
    title = f"{world} rank{'s, faked' if world > 1 else ''}"
    samples = meet(names, large, world, dtype, rounds)
    ours, theirs = samples[own], samples[other]
    report.rows.append(ratio(f"{title}: {own} / {other}", "wall", ours["wall"], theirs["wall"]))
    for name, sample in samples.items():
        if not all(sample.get("replayed", ())):
            report.notes.append(f"{title}: {name} did not replay each step that was counted: it is no captured step")
    if any(theirs.get("peak", ())) and any(ours["peak"]):
        report.rows.append(ratio(f"{title}: {own} / {other}", "peak memory", ours["peak"], theirs["peak"]))
    for name, sample in samples.items():
        report.rows += [Row(f"{title}: {name}, against {other}", *one) for one in absolute(sample, large, dtype)]
    hosts = meet(names, small, world, dtype, 3 * rounds)
    report.rows.append(ratio(f"{title}: {own} / {other}", "host", hosts[own]["wall"], hosts[other]["wall"]))
    for name, sample in hosts.items():
        unit = 1e6 * statistics.median(sample["wall"]) / small.depth
        report.rows.append(Row(f"{title}: {name}, against {other}", "host µs a unit", unit))
    report.medians[f"{title}, {other if own == 'fshard' else f'{own} / {other}'}"] = {
        name: {kind: statistics.median(values) for kind, values in sample.items() if isinstance(values, list)}
        for name, sample in samples.items()
    }


def absolute(sample: dict[str, Any], size: Size, dtype: str) -> list[tuple[str, float]]:
    """Of one peer: milliseconds of a step, model FLOPs utilization, the share of the time in which no kernel runs."""
    wall = statistics.median(sample["wall"])
    found = [("ms a step", 1e3 * wall)]
    if rate := peak_rate(dtype):
        found.append(("MFU", flops(size) / (wall * rate)))
    if sample.get("profile", {}).get("span") and "replayed" not in sample:  # a step under the profiler is not replayed
        found.append(("idle share", sample["profile"]["idle"] / sample["profile"]["span"]))
    return found


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


def missing(name: str, dry: bool, dtype: str) -> str | None:
    """Why there is no such peer here, or None."""
    if name != "jax":
        return gpu_peers.obstacle(name + (" bf16" if dtype == "mixed" else ""))
    why = jax_fsdp.obstacle()
    return why if why or dry else jax_fsdp.no_gpu()


def measure(args: argparse.Namespace) -> int:
    """All cases, or the message that there is no GPU."""
    if not torch.cuda.is_available() and not args.cpu_dry_run:
        print("gpu: skipped: no GPU at hand, so nothing was measured; --cpu-dry-run runs the code on a tiny model")
        return 0
    dry = args.cpu_dry_run
    size = DRY if dry else replace(LARGE, depth=args.depth or LARGE.depth, batch=args.rows or LARGE.batch)
    rounds = args.rounds or (2 if dry else 5 if args.quick else 15)
    configuration = {"model": asdict(size), "dtype": args.dtype, "rounds": rounds, "dry run on CPU": dry}
    claim = f"Dry run on CPU, figures without meaning. {__doc__.splitlines()[0]}" if dry else __doc__.splitlines()[0]
    report = Report("gpu_dry_run" if dry else "gpu", claim, configuration)
    report.environment["device"] = "cpu" if dry else torch.cuda.get_device_name()
    args.results = args.results or (QUICK if dry else None)
    deadline = time.monotonic() + args.seconds
    for name in args.cases:
        ranks, _, pair = name.partition(" ")
        own, slash, other = pair.partition(" / ")
        names = (own, other) if slash else ("fshard", pair)
        world = int(ranks)
        why = next((why for one in names if (why := missing(one, dry, args.dtype))), None)
        if world > 1 and dry and args.dtype == "mixed":
            why = "rounded gradients need a GPU there"
        if not why and time.monotonic() > deadline:
            why = "no time was left"
        if why:
            report.notes.append(f"{name}: skipped: {why}")
            continue
        try:
            case(report, world, names, (size, DRY if dry else HOST), args.dtype, rounds)
        except SystemExit as error:  # a process has died, is silent, or trains another model
            report.notes.append(f"{name}: failed: {error}")
        print(f"{name}: done", flush=True)
        report.write(args)
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen, and what a worker is told."""
    cli.add_argument("--cpu-dry-run", action="store_true", help="run the code on a tiny model, without a GPU")
    cli.add_argument("--rounds", type=int, help="steps of each peer")
    cli.add_argument("--depth", type=int, help="blocks, instead of the benchmark's own")
    cli.add_argument("--rows", type=int, help="of 1,024 tokens in a step; 4 by default, and 16 are 16,384 tokens")
    cli.add_argument("--dtype", choices=DTYPES, default="bf16", help=MIXED)
    cli.add_argument(
        "--cases", nargs="+", choices=CASES, default=CASES, metavar="CASE", help="ranks and peers, as '8 fsdp2'"
    )
    cli.add_argument("--seconds", type=float, default=3600.0, help="after which no case begins")
    for name, kind in (("worker", int), ("world", int), ("peer", str), ("size", str)):
        cli.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    run: Callable[[argparse.Namespace], int] = work if given.worker else measure
    sys.exit(run(given))
