"""One rank of ``bubbles.py``: builds the pipelines, lets them take turns, writes what steps took and were to take."""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import pipeline_peers
import torch
import torch.distributed as dist
import worker
from model import Size, rows
from peers import Peer, interleave, process_group

import fshard as fs


def main() -> int:
    """Run, gather, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--peers", nargs="+", required=True)
    cli.add_argument("--microbatches", type=int, required=True)
    cli.add_argument("--rounds", type=int, required=True)
    cli.add_argument("--seconds", type=float, required=True)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with process_group():
        size = Size(tokens=8, batch=args.microbatches)
        peers = {name: made(name, args) for name in args.peers}
        samples = interleave(peers, size, args.rounds, part=0)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {"samples": samples})
        if dist.get_rank() == 0:
            found = worker.combine(parts)["samples"]
            walls = {name: sample["wall"] for name, sample in found.items()}
            told = {
                name: simulated(name, peer, size, args.seconds) for name, peer in peers.items() if "torch" not in name
            }
            args.out.write_text(json.dumps({"walls": walls, "simulated": told}))
        dist.barrier()
    return 0


def made(name: str, args: argparse.Namespace) -> Peer:
    """A pipeline whose units sleep."""
    ranks, order = dist.get_world_size(), name.split()[1]
    if name == "torch 1f1b":
        return pipeline_peers.TorchPipeline(pipeline_peers.naps(ranks, args.seconds), ranks, args.microbatches)
    folded = order == "zbv"
    cut = pipeline_peers.naps(ranks * (1 + folded), args.seconds / (1 + folded))
    return pipeline_peers.FshardPipeline(cut, ranks, args.microbatches, folded=folded, pipeline=order)


def simulated(name: str, peer: Any, size: Size, seconds: float) -> float:
    """The idle share that a forecast says, for sleeps alone."""
    each = seconds / 2 if "zbv" in name else seconds
    schedules = peer.train.trace(rows(size, 0, 0)).schedules
    kinds = {op.kind for one in schedules.ranks for op in one}
    costs = {("forward", ""): each, ("backward", ""): 2 * each, ("forward", "root"): 0.0, ("backward", "root"): 0.0}
    if "weight" in kinds:
        costs |= {("backward", ""): each, ("weight", ""): each}
    return float(fs.sim.simulate(schedules, fs.sim.Costs(costs)).bubble)


if __name__ == "__main__":
    raise SystemExit(main())
