"""One rank of ``pipeline.py``: builds the pipelines, sees that they train alike, lets them take turns, writes both."""

import argparse
import functools
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import memory
import pipeline_peers
import torch
import torch.distributed as dist
import worker
from model import Size, rows
from peers import Peer, interleave, process_group


def main() -> int:
    """Run, gather, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--peers", nargs="+", default=["torch", "fshard"], choices=sorted(pipeline_peers.PEERS))
    cli.add_argument("--stages", type=int, default=2)
    cli.add_argument("--microbatches", type=int, default=8)
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--memory", type=int, default=0, help="1: peaks of memory and no times")
    for name, default in (("depth", 8), ("width", 256), ("heads", 4), ("tokens", 128), ("batch", 16)):
        cli.add_argument(f"--{name}", type=int, default=default)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, measure(args))
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(parts if args.memory else worker.combine(parts)))
        dist.barrier()
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything of this rank."""
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    data = dist.get_rank() % (dist.get_world_size() // args.stages)  # ranks of a pipeline have the same rows
    mine = functools.partial(rows, size, rank=data)

    def made(name: str) -> Peer:
        cut = pipeline_peers.gpt(size, args.stages)
        return pipeline_peers.PEERS[name](cut, args.stages, args.microbatches)

    if args.memory:
        return {name: peak(made(name), mine(0), args.rounds) for name in args.peers}
    built = {name: made(name) for name in args.peers}
    pipeline_peers.check_agreement(built, mine, args.stages)
    return {"samples": interleave(built, size, args.rounds, part=data)}


def peak(peer: Peer, batch: torch.Tensor, steps: int) -> float:
    """The peak of the heap in a step, above what is there between steps."""
    peer.step(batch)
    return statistics.median([heap for _, heap in memory.peaks(lambda: peer.step(batch), 2, steps)])


if __name__ == "__main__":
    sys.exit(main())
