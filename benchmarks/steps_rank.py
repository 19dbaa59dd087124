"""One rank of ``steps.py``: sees that steps by parts have the bits of train steps, times the peers, writes both."""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import compositions
import peers
import torch
import torch.distributed as dist
import worker
from model import Size, make, rows

import fshard as fs
from fshard import tree


def same_bits(size: Size, steps: int = 3) -> dict[str, bool]:
    """Whether the parts by hand and the train step come to the same losses, norms and states, by option."""
    found = {}
    for name, options in compositions.OPTIONS.items():
        ready = compositions.train_step(make(size), **options)
        written = compositions.by_parts(make(size), **options)
        same = True
        for number in range(steps):
            batch = rows(size, number, dist.get_rank())
            ready.state, told = ready.train(ready.state, batch)
            written.state, metrics = written.train(written.state, batch)
            same &= bool(told.loss == metrics["loss"]) and bool(told.grad_norm == metrics["norm"])
        trees = [tree.leaves((step.state.params, step.state.opt_state)) for step in (ready, written)]
        same &= all([torch.equal(a, b) for a, b in zip(*trees, strict=True)])
        everywhere = torch.tensor(float(same))
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        found[name] = bool(everywhere)
    return found


def check_agreement(built: dict[str, Any], size: Size, tolerance: float = 1e-5) -> None:
    """See that the first losses of those agree that begin with the same one.

    Raises:
        SystemExit: they do not.
    """
    losses = {}
    for name, peer in built.items():
        peer.step(rows(size, 0, dist.get_rank()))
        losses[name] = float(peer.loss)
    for first, *others in (("train step", "by parts", "train step clip", "by parts clip", "sam"), ("gan apart", "gan")):
        for name in others:
            if {first, name} <= set(losses) and abs(losses[name] / losses[first] - 1) > tolerance:
                raise SystemExit(f"the peers do not agree: {name} {losses[name]}, {first} {losses[first]}")


def sent_bytes(schedule: fs.Schedule) -> int:
    """What a rank sends in a step, by its schedule."""
    sizes = {(move.kind, group.name): move.sent for group in schedule.groups for move in group.transfers}
    return sum(sizes.get((op.kind, op.target), 0) for op in schedule.ops)


def fewest_bytes(ready: compositions.Step) -> float:
    """What a rank must send for DPO: all that a train step sends, and each group of the reference once."""
    share = 1 - 1 / dist.get_world_size()
    groups = ready.state.plan.groups
    sizes = {group.name: sum(leaf.numel * leaf.dtype.itemsize for leaf in group.leaves) for group in groups}
    moved = [op.target for op in ready.train.schedule.ops if op.kind in ("all_gather", "reduce_scatter")]
    return share * sum(sizes[target] for target in [*sizes, *moved])


def main() -> int:
    """Run, gather, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--peers", nargs="+", default=[*compositions.PEERS], choices=sorted(compositions.PEERS))
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--count", type=int, default=0, help="1: count bytes on the lab's link")
    for name, default in (("depth", 8), ("width", 256), ("heads", 4), ("tokens", 128), ("batch", 2)):
        cli.add_argument(f"--{name}", type=int, default=default)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group():
        found: dict[str, Any] = {"bits": same_bits(size)}
        built: dict[str, Any] = {name: compositions.PEERS[name](make(size)) for name in args.peers}
        check_agreement(built, size)
        found["samples"] = peers.interleave(built, size, args.rounds, worker.sent if args.count else None)
        if "dpo" in built and "train step" in built:
            (schedule,) = built["dpo"].schedules
            found["dpo"] = {"scheduled": sent_bytes(schedule), "fewest": fewest_bytes(built["train step"])}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(worker.combine(parts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
