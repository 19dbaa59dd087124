"""Functional tools: gradients of samples, clipped sums and Hessian-vector products of a sharded MLP.

Products are those of ``fs.func.hvp``, on a schedule, and, as *torch.func*, of ``jvp(grad(f))`` on ``sharded_loss``.

The claim: the memory of one rank falls as ranks are added, below what the whole batch takes in one process. Time is
told: a rank's products against the same compute of its rows alone, unsharded and without communication, in turns. A
sum of clipped gradients is told against the plain gradient on the same plan, its time and its memory; sixteen samples
of the trace of the Hessian against one, their time and their gathers. On links of 1 Gbit/s, where the lab can be built,
products stand beside the larger of compute and bytes. Products of a GPT stand beside JAX's (see jax_products.py).

Memory is what the C allocator has handed out at the peak of a call, above what was there before there was a model, on
rank 0 (see memory.py). *reshard* gathers units for each pass, two ahead if nothing is said; the others gather once, and
hold what they gathered.
"""

import argparse
import gc
import importlib.util
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax_products
import lab
import opacus_sums
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from memory import LIBC, MIB, Watch, in_use
from torch import Tensor, nn

import fshard as fs
from fshard import tree

RANKS = (1, 2, 4)
TOLERANCE, CLIP = 1e-4, 0.01
SAMPLES, HOWS = 16, (None, "fx")
RATE, LINK = "1gbit", 125e6
"""The links of the lab, and their bytes a second."""
PRODUCTS = {"hvp": 1.5, "hvp reshard": 2.2, "hvp fx": 1.5, "hvp reshard fx": 2.2}
"""What each product may take of its compute alone."""
MANY_ROWS, OF_MANY = 256, {"hvp": 1.15, "hvp reshard": 1.6, "hvp fx": 1.15, "hvp reshard fx": 1.6}
"""Rows of a rank with which compute outweighs what the host does for an operator, and what products may take of it."""
HEAPS = {"hvp reshard": (0.75, 0.5), "hvp reshard, one ahead": (0.75, 0.5), "per sample": (0.75, 0.5)}
"""The memory that 2 and 4 ranks may need, of the whole batch's in one process."""


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def module(depth: int, width: int) -> nn.Module:
    """The model, always with the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(depth)))


def loss_with(model: fs.Model) -> Callable[[Any, Tensor], Tensor]:
    """A mean over rows."""
    return lambda params, x: (model.apply(params, x) - 1).square().mean()


class Sharded:
    """The tools on this rank's shards."""

    def __init__(self, mesh: fs.Mesh, depth: int, width: int, reshard: bool, ahead: int = 2) -> None:
        with torch.device("meta"):  # or the module would hold all parameters
            model = fs.split(module(depth, width), units=("*",))
        whole = fs.split(module(depth, width)).params
        self.plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        loss = loss_with(model)
        self.params = fs.shard(whole, self.plan)
        self.v = fs.shard(tree.map(lambda leaf: torch.full_like(leaf, 0.01), whole), self.plan)
        self.samples = {how: fs.func.per_sample_grad(loss, self.plan, compile=how) for how in HOWS}
        self.clips = {how: fs.func.clipped_grad(loss, self.plan, CLIP, reshard=reshard, compile=how) for how in HOWS}
        self.slopes = fs.value_and_grad(loss, self.plan, schedule=fs.Policy(reshard=reshard))
        self.product = fs.func.hvp(loss, self.plan, schedule=fs.Policy(reshard=reshard, prefetch=ahead))
        self.compiled = fs.func.hvp(loss, self.plan, reshard=reshard, compile="fx")
        self.probes = {n: fs.func.hessian_trace_samples(loss, self.plan, n) for n in (1, SAMPLES)}
        self.key = fs.random.key(0)
        self.f = fs.func.sharded_loss(loss, self.plan, reshard=reshard)

    def hvp(self, x: Tensor) -> Any:
        """The product, on a schedule."""
        return self.product(self.params, self.v, x)

    def graphs(self, x: Tensor) -> Any:
        """The same, whose units run as graphs."""
        return self.compiled(self.params, self.v, x)

    def transformed(self, x: Tensor) -> Any:
        """The same by torch.func."""
        at, v = (tree.map(torch.clone, one) for one in (self.params, self.v))
        return torch.func.jvp(lambda p: torch.func.grad(self.f)(p, x), (at,), (v,))[1]

    def per_sample(self, x: Tensor, how: str | None = None) -> Any:
        """The gradients of this rank's rows."""
        return self.samples[how](self.params, x)

    def clipped(self, x: Tensor, how: str | None = None) -> Any:
        """The sum of clipped gradients of all rows."""
        return self.clips[how](self.params, x)

    def gradient(self, x: Tensor) -> Any:
        """The gradient, without clipping."""
        return self.slopes(self.params, x)

    def traces(self, x: Tensor, samples: int) -> Tensor:
        """Samples of the trace of the Hessian."""
        return self.probes[samples](self.params, x, self.key)

    def gathers(self, samples: int) -> int:
        """The gathers of the latest call of ``traces``."""
        probes = self.probes[samples]
        runs = -(-samples // probes.together)
        return runs * [op.kind for op in probes.schedule].count("all_gather")

    def seconds(self, x: Tensor, rate: float) -> float:
        """The time that the bytes of a product take on a link, in bytes a second."""
        schedule = self.product.trace(x).schedule
        infos = {info.name: info for info in schedule.groups}
        moves = [infos[op.target].transfer(op.kind) for op in schedule if op.target in infos]
        return sum([move.sent for move in moves if move is not None]) / rate


class Plain:
    """The same by torch.func on whole parameters."""

    def __init__(self, depth: int, width: int) -> None:
        model = fs.split(module(depth, width), units=())
        self.loss, self.params = loss_with(model), model.params
        self.v = tree.map(lambda leaf: torch.full_like(leaf, 0.01), self.params)

    def hvp(self, x: Tensor) -> Any:
        """The product."""
        return torch.func.jvp(lambda p: torch.func.grad(self.loss)(p, x), (self.params,), (self.v,))[1]

    def per_sample(self, x: Tensor) -> Any:
        """The gradients of all rows."""
        return torch.vmap(torch.func.grad(lambda p, row: self.loss(p, row[None])), (None, 0))(self.params, x)


def beside_opacus(mesh: fs.Mesh, args: argparse.Namespace, x: Tensor) -> dict[str, list[float]]:
    """Processor time of clipped sums in one process, in turns, when both have found the same."""
    ours = Sharded(mesh, args.depth, args.width, False)
    peer = opacus_sums.Opacus(module(args.depth, args.width), CLIP)
    want, calls = peer.clipped(x), {"": ours.clipped, " fx": partial(ours.clipped, how="fx"), "opacus": peer.clipped}
    for how in ("", " fx"):
        found = dict(tree.paths(fs.unshard(calls[how](x)[0], ours.plan)))
        for path, g in want.items():
            torch.testing.assert_close(found[path], g, rtol=TOLERANCE, atol=TOLERANCE * g.abs().max().item())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            begin = time.process_time()
            call(x)
            times[name].append(time.process_time() - begin)
    return times


def batch(rows: int, width: int) -> Tensor:
    """The global batch."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


def check(ours: Sharded, plain: Plain, x: Tensor, mine: Tensor, samples: bool) -> None:
    """Both must find the same."""
    for got, want in zip(tree.leaves(ours.hvp(mine)), tree.leaves(fs.shard(plain.hvp(x), ours.plan)), strict=True):
        torch.testing.assert_close(
            got, want, rtol=TOLERANCE, atol=TOLERANCE * want.abs().max().item() if len(want) else 0
        )
    if not samples:
        return
    for got, want in zip(tree.leaves(ours.per_sample(mine)), tree.leaves(plain.per_sample(mine)), strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE * want.abs().max().item())


def timed(call: Callable[[], Any]) -> float:
    """Seconds until every rank is done."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begin


def peak(make: Callable[[], Callable[[], Any]]) -> float:
    """The most bytes in use during one call, above what was in use before there was a model."""
    gc.collect()
    before = in_use()
    call = make()
    call()  # the first call makes communicators and caches
    gc.collect()
    watch = Watch()
    with watch:
        call()
    watch.close()
    return float(watch.most - before)


def warm(mesh: fs.Mesh) -> None:
    """Bring in what PyTorch imports and keeps at the first use of each transform, and make the communicators."""
    small, x = Sharded(mesh, 2, 16, True), torch.zeros(2, 16)
    kept = Sharded(mesh, 2, 16, False)
    small.hvp(x), small.per_sample(x), small.transformed(x), kept.hvp(x), kept.transformed(x)
    plain = Plain(2, 16)
    plain.hvp(x), plain.per_sample(x)


def work(args: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        x = batch(args.batch, args.width)
        mine = x.chunk(mesh.size)[mesh.rank]
        found: dict[str, Any] = {}
        warm(mesh)
        size = args.depth, args.width
        makers: dict[str, Callable[[], Callable[[], Any]]] = {
            "hvp reshard": lambda: partial(Sharded(mesh, *size, True).hvp, mine),
            "hvp reshard, one ahead": lambda: partial(Sharded(mesh, *size, True, ahead=1).hvp, mine),
            "hvp": lambda: partial(Sharded(mesh, *size, False).hvp, mine),
            "per sample": lambda: partial(Sharded(mesh, *size, False).per_sample, mine),
            "clipped": lambda: partial(Sharded(mesh, *size, False).clipped, mine),
            "gradient": lambda: partial(Sharded(mesh, *size, False).gradient, mine),
            "plain hvp": lambda: partial(Plain(*size).hvp, x),
            "plain per sample": lambda: partial(Plain(*size).per_sample, x),
        }
        if hasattr(LIBC, "mallinfo2"):
            # Plain PyTorch holds the gradients of all rows: one rank does, whose numbers are read.
            wanted = {name: make for name, make in makers.items() if mesh.rank == 0 or not name.startswith("plain")}
            found["peaks"] = {} if args.products else {name: peak(make) for name, make in wanted.items()}
        if mesh.size == 1 and args.rounds and importlib.util.find_spec("opacus"):
            found["opacus"] = beside_opacus(mesh, args, x)
        elif mesh.size > 1 and args.rounds:
            ours, kept = (Sharded(mesh, args.depth, args.width, reshard) for reshard in (True, False))
            plain = Plain(args.depth, args.width)
            check(ours, plain, x, mine, samples=not args.products)
            turns = {
                "hvp reshard": lambda: ours.hvp(mine),
                "hvp": lambda: kept.hvp(mine),
                "hvp fx": lambda: kept.graphs(mine),
                "hvp reshard fx": lambda: ours.graphs(mine),
                "torch.func reshard": lambda: ours.transformed(mine),
                "torch.func": lambda: kept.transformed(mine),
                "plain hvp": lambda: plain.hvp(mine),
                "clipped": lambda: kept.clipped(mine),
                "clipped fx": lambda: kept.clipped(mine, "fx"),
                "gradient": lambda: kept.gradient(mine),
                "one sample of the trace": lambda: kept.traces(mine, 1),
                f"{SAMPLES} samples of the trace": lambda: kept.traces(mine, SAMPLES),
                "per sample": lambda: ours.per_sample(mine),
                "per sample fx": lambda: ours.per_sample(mine, "fx"),
                "plain per sample": lambda: plain.per_sample(mine),
            }
            if args.products:
                turns = {name: turn for name, turn in turns.items() if "hvp" in name}
            times: dict[str, list[float]] = {name: [] for name in turns}
            for number in range(-1, args.rounds):
                # What a call leaves to the allocator makes the next one slower or faster: none always follows the same.
                for name, turn in random.Random(number).sample([*turns.items()], len(turns)):
                    taken = timed(turn)
                    if number >= 0:
                        times[name].append(taken)
            found["times"] = times
            found["gathers"] = [] if args.products else [kept.gathers(n) for n in (1, SAMPLES)]
            found["bytes"] = {"hvp": kept.seconds(mine, LINK), "hvp reshard": ours.seconds(mine, LINK)}
        if mesh.rank == 0:
            args.out.write_text(json.dumps(found))
        dist.barrier()
    return 0


def measure(args: argparse.Namespace) -> int:
    """Run the workers, report."""
    depth, width, rows = (4, 128, args.batch or 32) if args.quick else (8, 256, args.batch or 32)
    rounds = 5 if args.quick else 15
    configuration = {"depth": depth, "width": width, "rows": rows, "rounds": rounds, "ranks": list(RANKS)}
    report = Report("functional", __doc__.splitlines()[0], configuration)
    options = {"worker": 1, "depth": depth, "width": width, "batch": rows}
    found = {n: run_workers(n, None, {**options, "rounds": rounds * (n <= 2)}, script="functional.py") for n in RANKS}
    times = found[2]["times"]
    for name, target in {**PRODUCTS, "torch.func": None, "torch.func reshard": None}.items():
        alone = times["plain hvp"]
        report.rows.append(ratio(f"2 ranks: {name} / its compute alone", "wall", times[name], alone, target))
    many_rows(report, {**options, "rounds": rounds})
    for how in ("", " fx"):
        own, alone = times[f"per sample{how}"], times["plain per sample"]
        report.rows.append(ratio(f"2 ranks: per sample{how} / its compute alone", "wall", own, alone, target=1.1))
        clipped, gradient = times[f"clipped{how}"], times["gradient"]
        report.rows.append(ratio(f"2 ranks: clipped{how} / gradient", "wall", clipped, gradient, target=1.6))
    one, many = times["one sample of the trace"], times[f"{SAMPLES} samples of the trace"]
    report.rows.append(ratio(f"2 ranks: {SAMPLES} samples of the trace / one", "wall", many, one, target=8))
    alone, together = found[2]["gathers"]
    report.rows.append(Row(f"2 ranks: {SAMPLES} samples of the trace / one", "gathers", together / alone))
    if opacus := found[1].get("opacus"):
        for how in ("", " fx"):
            report.rows.append(
                ratio(f"1 rank: clipped{how} / Opacus", "cpu", opacus[how], opacus["opacus"], target=1.0)
            )
    else:
        report.notes.append("no Opacus: pip install 'fshard[bench-opacus]'")
    slow_links(report, {**options, "rounds": rounds})
    for n in RANKS[1:2] if args.quick else RANKS[1:]:
        jax_products.add_rows(report, n, rounds)
    for name, values in times.items():
        report.rows.append(middle(f"2 ranks: {name}", "ms", [1000 * value for value in values], strict=False))
    report.medians = {name: statistics.median(values) for name, values in times.items()}
    if "peaks" in found[1]:
        memory(report, {n: found[n]["peaks"] for n in RANKS})
    else:
        report.notes.append("no memory: the C library has no mallinfo2, which glibc has since 2.33")
    return report.finish(args)


def memory(report: Report, peaks: dict[int, dict[str, float]]) -> None:
    """Add the rows of memory. Plain PyTorch holds the whole batch, as one process would have to."""
    for name in (*HEAPS, "hvp"):
        whole = peaks[2]["plain per sample" if name == "per sample" else "plain hvp"]
        for n in RANKS:
            report.rows.append(Row(f"{n} ranks: {name}", "MiB", peaks[n][name] / MIB))
        # A product that keeps whole parameters and their tangents is told without a target.
        for n, target in zip(RANKS[1:], HEAPS.get(name, (None, None)), strict=True):
            report.rows.append(Row(f"{n} ranks: {name} / plain", "heap", peaks[n][name] / whole, target=target))
    for n in RANKS:
        clipped = peaks[n]["clipped"] / peaks[n]["gradient"]
        report.rows.append(Row(f"{n} ranks: clipped / gradient", "heap", clipped, target=1.3))
    report.rows.append(Row("plain hvp, the whole batch", "MiB", peaks[1]["plain hvp"] / MIB))
    report.rows.append(Row("plain per sample, the whole batch", "MiB", peaks[1]["plain per sample"] / MIB))


def many_rows(report: Report, options: dict[str, Any]) -> None:
    """Add the rows of products of larger batches."""
    found = run_workers(2, None, {**options, "products": 1, "batch": 2 * MANY_ROWS}, script="functional.py")
    for name, target in OF_MANY.items():
        case = f"2 ranks, {MANY_ROWS} rows each: {name} / its compute alone"
        report.rows.append(ratio(case, "wall", found["times"][name], found["times"]["plain hvp"], target))


def slow_links(report: Report, options: dict[str, Any]) -> None:
    """Add the rows of products on two ranks of the lab."""
    if why := lab.obstacle():
        report.notes.append(f"no links of {RATE}: {why}")
        return
    found = run_workers(2, RATE, {**options, "products": 1}, script="functional.py")
    times = found["times"]
    for name in PRODUCTS:
        least = [max(alone, found["bytes"][name.removesuffix(" fx")]) for alone in times["plain hvp"]]
        report.rows.append(ratio(f"2 ranks, {RATE}: {name} / max(compute, bytes)", "wall", times[name], least, 1.25))


def options(cli: argparse.ArgumentParser) -> None:
    """What a worker is told."""
    for name in ("worker", "rounds", "depth", "width", "batch", "products"):
        cli.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)  # --batch: other rows, of all ranks
    cli.add_argument("--out", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    sys.exit(work(given) if given.worker else measure(given))
