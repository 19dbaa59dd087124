"""One rank of PyTorch: builds peers, and lets one of them make a step when a line on standard input says so.

The counterpart of ``jax_rank.py``; see ``turns.py`` for the lines.
"""

import argparse
import sys
import time
import warnings

import peers
import torch
import torch.distributed as dist
from model import Size, rows
from turns import answering, serve


def step(peer: peers.Peer, size: Size, number: int) -> dict[str, float]:
    """One step: all ranks begin together."""
    batch = rows(size, number, dist.get_rank())
    dist.all_reduce(torch.zeros(1))
    wall, cpu = time.perf_counter(), time.process_time()
    peer.step(batch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall": wall, "cpu": cpu, "loss": float(peer.loss)}


def main() -> int:
    """Join, build, obey."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--peers", nargs="+", required=True, choices=sorted(peers.PEERS))
    for name in ("depth", "width", "heads", "tokens", "batch"):
        cli.add_argument(f"--{name}", type=int, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = answering()
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group():
        built = peers.build(args.peers, size)
        serve(lambda name, number: step(built[name], size, number), answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
