"""One GPU: a GPT of over 1B parameters, in one rank over NCCL, and a rank's own work in steps of 8 and 64 ranks.

The claim: sharding costs a GPU little. For many ranks a *silent* process group stands in (``silent.py``): a step holds
what the rank itself does, at its sizes of shards and buffers, and no communication. Peers: plain PyTorch, the same
under ``torch.compile``, FSDP2, and JAX.

Each peer has a process of its own, so that memory is its own. fshard and one other at a time take turns, step by step
with a wait for the device after each, and then by many steps between two waits, as in training.
Results are written after each case, so that a run that is cut keeps what it has; a case that fails leaves a note. Where
there is no GPU nothing is measured; ``--cpu-dry-run`` runs all of this on a tiny model, to see that it works.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu_peers
import jax_fsdp
import silent
import torch
from common import HERE, QUICK, QUIET, Report, Row, arguments, ratio
from gpu_worker import DRY, DTYPES, LARGE, flops, form, peak_rate, work
from gpu_worker import exposed as exposed
from model import Size
from turns import Family

HOST = Size(depth=12, width=64, heads=2, tokens=16, batch=1, vocabulary=64)
"""So little work in each unit that the host's time is what passes."""

CASES = (
    "1 eager",
    "1 fshard inductor / compiled loss",
    "1 fshard inductor / fsdp2 titan",
    "1 fshard inductor graph / compiled loss",
    "1 fshard graph / compiled graphs",
    "1 fshard fx / eager",
    "1 fshard inductor clip / compiled clip",
    "1 fshard clip / eager clip",
    "1 fsdp2",
    "8 fsdp2",
    "64 fsdp2",
    "1 compiled",
    "1 jax",
    "8 fshard inductor / fsdp2 titan",
    "64 fshard inductor / fsdp2 titan",
    "8 fsdp2 async",
)
"""The number of ranks and two peers, or whom fshard meets: first what matters most, since time may run out."""

WARM, BLOCKS, ANSWER = 2, 3, 150.0
"""Rounds before the first that counts, rounds of many steps, and seconds for one answer: a first step may compile."""

TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "mixed": 2e-2}
MIXED = "of everything; mixed: parameters and optimizer state in fp32, compute and communication in bf16"


def command(name: str, size: Size, world: int, dtype: str, data: Path) -> list[str]:
    """What starts a peer."""
    if name == "jax":
        platform = "cuda" if torch.cuda.is_available() else "cpu"
        return jax_fsdp.jax_command(data, size, {"dtype": dtype}, platform)
    words = {"worker": 1, "peer": name, "size": json.dumps(asdict(size)), "world": world, "dtype": dtype}
    return [sys.executable, str(HERE / "gpu.py"), *(w for k, v in words.items() for w in (f"--{k}", str(v)))]


def meet(names: tuple[str, str], size: Size, world: int, dtype: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Two peers in turns: samples by peer and measure, and a few profiled steps of each that has a profiler."""
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
        if "jax" in names:  # which answers single steps alone
            return samples
        for number in range(BLOCKS):
            for name in names if number % 2 else names[::-1]:
                samples[name].setdefault("steady", []).append(families[name].ask("step steady 0")[0]["wall"])
        for name in names:
            samples[name]["profile"] = families[name].ask("step profile 0")[0]
    return samples


def around(name: str) -> dict[str, str]:
    """A peer's environment. JAX would take most of the memory at once, and leave none to the other."""
    if name == "jax":
        return {**jax_fsdp.JAX, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {**QUIET, "OMP_NUM_THREADS": "1"}


def title_of(name: str) -> str:
    """The text of a case in rows of results: the number of ranks, and who meets whom.

    >>> title_of("8 fsdp2"), title_of("1 fshard graph / compiled graphs")
    ('8 ranks, silent: fshard / fsdp2', '1 rank: fshard graph / compiled graphs')
    """
    world, own, other = parts_of(name)
    return f"{world} rank{'s, silent' if world > 1 else ''}: {own} / {other}"


def parts_of(name: str) -> tuple[int, str, str]:
    """The number of ranks and the two peers of a case."""
    ranks, _, pair = name.partition(" ")
    own, slash, other = pair.partition(" / ")
    return int(ranks), *((own, other) if slash else ("fshard", pair))


def case(report: Report, name: str, sizes: tuple[Size, Size], dtype: str, rounds: int) -> None:
    """One against another: time, memory, gaps at the large size, the host's time at the small one."""
    (large, small), (world, own, other), title = sizes, parts_of(name), title_of(name)
    ranks = title.partition(":")[0]
    samples = meet((own, other), large, world, dtype, rounds)
    ours, theirs = samples[own], samples[other]
    report.rows.append(ratio(title, "wall", ours["wall"], theirs["wall"]))
    for peer, sample in samples.items():
        if not all(sample.get("replayed", ())):
            how = ", ".join(sorted({*sample["ran"]} - {"replayed"}))
            report.notes.append(f"{ranks}: {peer} did not replay each step that was counted: {how}")
    if "steady" in ours:
        report.rows.append(ratio(title, "wall of many steps", ours["steady"], theirs["steady"]))
    if any(theirs.get("peak", ())) and any(ours["peak"]):
        report.rows.append(ratio(title, "peak memory", ours["peak"], theirs["peak"]))
    for peer, sample in samples.items():
        report.rows += [Row(f"{ranks}: {peer}, against {other}", *one) for one in absolute(sample, large, dtype)]
    hosts = meet((own, other), small, world, dtype, 3 * rounds)
    report.rows.append(ratio(title, "host", hosts[own]["wall"], hosts[other]["wall"]))
    for peer, sample in hosts.items():
        unit = 1e6 * statistics.median(sample["wall"]) / small.depth
        report.rows.append(Row(f"{ranks}: {peer}, against {other}", "host µs a unit", unit))
    report.medians[title] = {peer: medians(sample) for peer, sample in samples.items()}


def medians(sample: dict[str, Any]) -> dict[str, Any]:
    """The medians of a peer's samples, and its profile."""
    numbers = {kind: values for kind, values in sample.items() if kind not in ("ran", "profile")}
    return {kind: statistics.median(values) for kind, values in numbers.items()} | sample.get("profile", {})


def absolute(sample: dict[str, Any], size: Size, dtype: str) -> list[tuple[str, float]]:
    """Of one peer: milliseconds of a step, model FLOPs utilization, the share of the time in which no kernel runs."""
    wall = statistics.median(sample.get("steady") or sample["wall"])
    found = [("ms a step", 1e3 * statistics.median(sample["wall"]))]
    if "steady" in sample:
        found.append(("ms a step of many", 1e3 * wall))
    if rate := peak_rate(dtype):
        found.append(("MFU", flops(size) / (wall * rate)))
    if sample.get("profile", {}).get("span") and "replayed" not in sample:  # a step under the profiler is not replayed
        found.append(("idle share", sample["profile"]["idle"] / sample["profile"]["span"]))
    return found


def missing(name: str, dry: bool, dtype: str) -> str | None:
    """Why there is no such peer here, or None."""
    if name != "jax":
        return gpu_peers.obstacle(form(name, dtype))
    why = jax_fsdp.obstacle()
    return why if why or dry else jax_fsdp.no_gpu()


def obstacle(name: str, dry: bool, dtype: str) -> str | None:
    """Why a case cannot be measured here, or None."""
    world, *peers = parts_of(name)
    why = next((f"{peer}: {why}" for peer in peers if (why := missing(peer, dry, dtype))), None)
    return "rounded gradients need a GPU there" if world > 1 and dry and dtype == "mixed" else why


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
    report.environment |= {"device": "cpu"} if dry else {"device": torch.cuda.get_device_name(), "driver": driver()}
    args.results = args.results or (QUICK if dry else None)
    deadline = time.monotonic() + args.seconds
    if any(parts_of(name)[0] > 1 for name in args.cases):
        report.notes.append(f"Rows of 8 and 64 ranks leave out, {silent.LEFT_OUT}.")
    for name in args.cases:
        why = obstacle(name, dry, args.dtype)
        if not why and time.monotonic() > deadline:
            why = "no time was left"
        try:
            if not why:
                case(report, name, (size, DRY if dry else HOST), args.dtype, rounds)
        except SystemExit as error:  # a process has died, is silent, or trains another model
            why = f"failed: {error}"
        if why:
            report.rows.append(Row(title_of(name), "wall", why=why))
        print(f"{name}: {why or 'done'}", flush=True)
        report.write(args)
    return report.finish(args)


def driver() -> str:
    """The version of the card's driver; nothing if nobody can tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


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
