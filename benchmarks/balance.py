"""Balance: a step over links just so fast that the wire takes as long as the compute.

The claim: the step then takes at most 1.10 of the longer of the two alone. There any time that is not hidden shows.

* *Compute alone* is the same train step with its communication removed: every collective returns at once and moves
  nothing (`Mute`). What a step computes with is then not the model's weights, but numbers of the same kind.
* *Wire alone* is the schedule's gathers, reduces and waits in their order, with no compute between them.
* The link's rate is found by trying: from the bytes of a step and the time of compute alone, then corrected by what the
  wire took. All three are measured again at the rate that was found, in turns.

Sending takes some of the cores that compute: at 2 Gbit/s a third of one here. Ranks that compute long for what they
send (``--batch``) balance at rates where that is little, as it is on machines whose network card does the work.

Needs root, for the lab.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import lab
import peers
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from model import SMALL, Size, make, rows
from torch import Tensor
from worker import minimum_bytes

import fshard as fs
from fshard.runtime.comm import Communicator
from fshard.runtime.comm.communicator import Done
from fshard.sharding.mesh import Axes, Mesh

TARGET = 1.10
CLOSE = 0.05
"""Trying ends when compute and wire differ by less."""
WIRE = frozenset(("all_gather", "wait all_gather", "reduce_scatter", "wait reduce_scatter"))


@dataclass(frozen=True)
class MuteCommunicator:
    """A communicator whose collectives move nothing.

    A gather fills its range once, with copies of the shard, so that no uninitialized memory is computed with; later
    ones find whatever lies there. A reduction takes this rank's chunk. ``control`` answers as if all ranks were alike.
    """

    size: int
    control: bool
    filled: set[int] = field(default_factory=set)

    def all_gather(self, out: Tensor, shard: Tensor, after: Any = ()) -> Done:
        """Copies of the shard: always for ``control``, else once."""
        if self.control or out.data_ptr() not in self.filled:
            self.filled.add(out.data_ptr())
            out.view(self.size, -1).copy_(shard.view(1, -1))
        return Done()

    def reduce_scatter(self, out: Tensor, full: Tensor, stage: Tensor, add: bool, after: Any = ()) -> Done:
        """This rank's chunk."""
        chunk = full.view(-1)[: out.numel()]
        out.add_(chunk) if add else out.copy_(chunk)
        return Done()

    def all_reduce(self, buffer: Tensor, after: Any = ()) -> Done:
        """Nothing."""
        return Done()


@dataclass(frozen=True)
class Mute:
    """A transport of mute communicators."""

    mesh: Mesh
    asynchronous: bool = False

    def communicator(self, role: str, axes: Axes) -> Communicator:
        """A new one."""
        return MuteCommunicator(self.mesh.axis_size(axes), role == "control")

    def program(self) -> AbstractContextManager[object]:
        """Nobody waits."""
        return nullcontext()

    def close(self) -> None:
        """Nothing was joined."""


def replay(peer: peers.Fshard) -> Callable[[Tensor], None]:
    """A function that runs the communication of the peer's schedule and nothing else."""
    prepared = peer.train._runner.latest.prepared
    shards = fs.settle(peer.state).finished()
    actions = prepared.actions
    runs = actions.bind([op for op in peer.train.schedule.ops if op.kind in WIRE])

    def run(batch: Tensor) -> None:
        actions.start(shards, None)
        actions.gradients.touched.update(group.id for group in peer.plan.groups)  # or they would be zeroed first
        for perform in runs:
            perform()
        actions.stop()

    return run


def turns(size: Size, policy: dict[str, Any]) -> tuple[dict[str, Callable[[Tensor], object]], float]:
    """What takes turns, and the bytes that a rank sends in a step."""
    full, wire = peers.Fshard(make(size), **policy), peers.Fshard(make(size), **policy)
    mesh = replace(full.mesh, transport=Mute(full.mesh))
    compute = peers.Fshard(make(size), mesh=mesh, **policy)
    for number in range(3):
        for peer in (full, wire, compute):
            peer.step(rows(size, number, dist.get_rank()))
    return {"full": full.step, "compute": compute.step, "wire": replay(wire)}, minimum_bytes(full)


def work(args: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = replace(SMALL, depth=args.depth, batch=args.batch)
    with peers.process_group():
        takes, sends = turns(size, {"reshard": bool(args.reshard), "prefetch": args.prefetch})
        names = args.parts
        samples: dict[str, list[float]] = {name: [] for name in names}
        for number in range(-1, args.rounds):
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                batch = rows(size, number + 100, dist.get_rank())
                dist.all_reduce(torch.zeros(1))
                begin = time.perf_counter()
                takes[name](batch)
                if number >= 0:
                    samples[name].append(time.perf_counter() - begin)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, samples)
        if dist.get_rank() == 0:
            slowest = {name: [max(column) for column in zip(*(p[name] for p in parts), strict=True)] for name in names}
            args.out.write_text(json.dumps({"samples": slowest, "bytes": sends}))
    return 0


def search(ranks: int, options: dict[str, Any], tries: int) -> tuple[float, list[dict[str, float]]]:
    """The rate of links, in bits a second, at which wire alone takes as long as compute alone; and what was tried."""
    found = run_workers(ranks, None, {**options, "parts": ["compute"]}, script="balance.py")
    compute = statistics.median(found["samples"]["compute"])
    rate, tried = 8 * found["bytes"] / compute, []
    for _ in range(tries):
        found = run_workers(ranks, bits(rate), {**options, "parts": ["compute", "wire"]}, script="balance.py")
        wire, compute = (statistics.median(found["samples"][name]) for name in ("wire", "compute"))
        tried.append({"Mbit/s": rate / 1e6, "wire": wire, "compute": compute})
        if abs(wire / compute - 1) < CLOSE:
            break
        rate *= wire / compute
    return rate, tried


def bits(rate: float) -> str:
    """A rate as ``tc`` reads it."""
    return f"{round(rate / 1000)}kbit"


def measure(args: argparse.Namespace) -> int:
    """Find the rate for each case, measure there, report."""
    why = lab.obstacle()
    if why:
        print(f"balance: skipped: {why}")
        return 0
    rounds = args.rounds or (5 if args.quick else 15)
    model = asdict(replace(SMALL, depth=args.depth, batch=args.batch))
    configuration = {"model": model, "ranks": args.ranks, "rounds": rounds, "threads": 1, "prefetch": args.prefetch}
    report = Report("balance", __doc__.splitlines()[0], configuration)
    for ranks in args.ranks:
        for reshard in (1,) if args.quick else (1, 0):
            options = {"worker": 1, "reshard": reshard} | {
                name: getattr(args, name) for name in ("depth", "batch", "prefetch")
            }
            rate, tried = search(ranks, {**options, "rounds": rounds}, 2 if args.quick else 4)
            given = {**options, "rounds": rounds, "parts": ["full", "compute", "wire"]}
            found = run_workers(ranks, bits(rate), given, script="balance.py")
            title = f"{ranks} ranks{'' if reshard else ' no reshard'}, {rate / 1e6:.0f} Mbit/s"
            report.medians[title] = {"tried": tried, **{k: statistics.median(v) for k, v in found["samples"].items()}}
            report.rows += describe(title, found["samples"], 8 * found["bytes"] / rate)
    return report.finish(args)


def describe(title: str, samples: dict[str, list[float]], least: float) -> list[Row]:
    """The rows of one case. ``least``: seconds that the bytes of a step take at the link's rate."""
    full, compute, wire = (samples[name] for name in ("full", "compute", "wire"))
    longer, name = (compute, "compute") if statistics.median(compute) >= statistics.median(wire) else (wire, "wire")
    both = [a + b for a, b in zip(compute, wire, strict=True)]
    return [
        ratio(f"{title}: full / max(compute, wire) alone, here {name}", "wall", full, longer, TARGET),
        ratio(f"{title}: full / (compute + wire)", "wall", full, both),
        ratio(f"{title}: wire / compute", "wall", wire, compute),
        middle(f"{title}: wire / its bytes over the rate", "wall", [seconds / least for seconds in wire]),
    ]


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen, and what a worker is told."""
    cli.add_argument("--ranks", type=int, nargs="+", default=[2], help="numbers of ranks")
    cli.add_argument("--rounds", type=int, help="steps of each")
    cli.add_argument("--depth", type=int, default=16, help="blocks")
    cli.add_argument("--batch", type=int, default=8, help="rows a rank")
    cli.add_argument("--prefetch", type=int, default=2, help="of the schedule")
    for name in ("worker", "reshard"):
        cli.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    cli.add_argument("--parts", nargs="+", help=argparse.SUPPRESS)
    cli.add_argument("--out", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    sys.exit(work(given) if given.worker else measure(given))
