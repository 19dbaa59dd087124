"""One rank of a benchmark: builds the peers, checks that they train alike, lets them take turns, writes what it saw.

Run by the other benchmarks on loopback or in the lab; ``torchrun --nproc-per-node 2 benchmarks/worker.py`` works, too.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lab
import muons
import peers
import torch
import torch.distributed as dist
from model import Size

import fshard as fs


def minimum_bytes(peer: Any) -> float:
    """What a rank must send in one step: (W - 1) / W of the group, for each gather and reduce of the schedule.

    A group counts in the dtype of the parameters, also where its schedule sends it in another. With a wire format it
    counts in that: the payload of its elements, and a scale for each block of a leaf.
    """
    if not isinstance(peer, peers.Fshard):
        return 0.0
    schedule: fs.Schedule = peer.train.schedule
    share = 1 - 1 / dist.get_world_size()
    groups = {group.name: group for group in peer.plan.groups}
    moves = [op for op in schedule.ops if op.kind in ("all_gather", "reduce_scatter")]
    return sum(share * least(groups[op.target], op.kind) for op in moves)


def across_bytes(peer: Any, hosts: int = 2) -> float:
    """What a host must send to the others in a step that gathers and reduces each group once over all ranks.

    Each of its ranks sends its shard to each rank of another host.
    """
    world = dist.get_world_size()
    if not isinstance(peer, peers.Fshard) or world % hosts:
        return 0.0
    share = (world // hosts) * (world - world // hosts) / world
    return sum(share * least(group, kind) for group in peer.plan.groups for kind in ("all_gather", "reduce_scatter"))


def least(group: Any, kind: str) -> float:
    """The fewest bytes of a whole group in a kind of transfer."""
    form = group.wires.get(kind)
    if form is None:
        return float(sum(leaf.numel * leaf.dtype.itemsize for leaf in group.leaves))
    scales = sum(-(-leaf.numel // form.block) for leaf in group.leaves) if form.largest else 0
    return float(form.payload(sum(leaf.numel for leaf in group.leaves)) + 4 * scales)


def sent() -> int:
    """Bytes that this namespace has sent."""
    return lab.sent_bytes(Path("/proc/net/dev").read_text(), lab.DEVICE)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything of this rank."""
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    built = peers.build(args.peers, size)
    peers.check_agreement(built, size)
    samples = peers.interleave(built, size, args.rounds, sent if args.count else None)
    return {
        "samples": samples,
        "minimum": {name: minimum_bytes(peer) for name, peer in built.items()},
        "across": {name: across_bytes(peer) for name, peer in built.items()},
        "parameters": sum(p.numel() * p.element_size() for p in peers.make(size).parameters()),
    }


def combine(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks as one: the slowest rank's time, the sum of CPU times, the most bytes, round by round."""
    how = {"wall": max, "cpu": sum, "sent": max}
    samples = {
        name: {
            measure: [
                how[measure](column) for column in zip(*(p["samples"][name][measure] for p in parts), strict=True)
            ]
            for measure in how
        }
        for name in parts[0]["samples"]
    }
    return {**parts[0], "samples": samples}


def main() -> int:
    """Run, gather, write."""
    peers.PEERS.update(muons.PEERS)
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--peers", nargs="+", default=["fsdp2", "fshard"], choices=sorted(peers.PEERS))
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--count", type=int, default=0, help="1: count bytes on the lab's link")
    for name, default in (("depth", 8), ("width", 256), ("heads", 4), ("tokens", 128), ("batch", 2)):
        cli.add_argument(f"--{name}", type=int, default=default)
    cli.add_argument("--out", type=Path)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with peers.process_group():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, measure(args))
        if dist.get_rank() == 0:
            text = json.dumps(combine(parts))
            if args.out:
                args.out.write_text(text)
            else:
                print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
