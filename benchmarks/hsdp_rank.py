"""One rank of ``hsdp.py``: times the peers, then makes a step whose transfers are watched, and writes both."""

import argparse
import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import peers
import torch
import torch.distributed as dist
import worker
from model import Size, make, rows
from stopwatch import Stopwatch

import fshard as fs


def watched(size: Size, steps: int = 4) -> dict[str, Any]:
    """A step of HSDP, the last of some, with begin and end of each of its transfers."""
    mesh = peers.replicated()
    watch = Stopwatch(mesh.transport)
    peer = peers.Fshard(make(size), mesh=dataclasses.replace(mesh, transport=watch))
    for number in range(steps):
        for spans in watch.spans.values():
            spans.clear()
        dist.barrier()
        peer.step(rows(size, number, dist.get_rank()))
    schedule: fs.Schedule = peer.train.schedule
    over = {(move.kind, group.name): move.axes for group in schedule.groups for move in group.transfers}
    left = {comm: iter(spans) for comm, spans in watch.spans.items()}
    arrivals = {}
    for at, op in enumerate(schedule.ops):
        if (axes := over.get((op.kind, op.target))) is not None and (op.kind, axes) in left:
            arrivals[at] = next(left[op.kind, axes], None)
    times = peer.train._runner.latest.times  # the raw clock, which all ranks of a machine share
    return {
        "schedule": str(schedule),
        "times": list(times),
        "arrivals": {at: span for at, span in arrivals.items() if span},
    }


def main() -> int:
    """Run, gather, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--peers", nargs="+", default=["fsdp2 hsdp", "fshard hsdp"], choices=sorted(peers.PEERS))
    cli.add_argument("--rounds", type=int, default=5)
    for name, default in (("depth", 8), ("width", 256), ("heads", 4), ("tokens", 128), ("batch", 2)):
        cli.add_argument(f"--{name}", type=int, default=default)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group():
        built = peers.build(args.peers, size)
        peers.check_agreement(built, size)
        mine = {"samples": peers.interleave(built, size, args.rounds, worker.sent), "watched": watched(size)}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        if dist.get_rank() == 0:
            found = worker.combine(parts)
            args.out.write_text(json.dumps({**found, "watched": [part["watched"] for part in parts]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
