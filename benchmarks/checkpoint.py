"""Checkpoints: saving and restoring a train state on four ranks, and how long an asynchronous save holds up training.

The claim: fshard's Checkpointer, which hashes every byte, takes no longer than torch.distributed.checkpoint to save and
to restore; and an asynchronous save stalls training by at most 5 % of a step. Peers take turns, round by round:

* **fshard**: ``save`` and ``restore``.
* **dcp**: FSDP2, ``get_state_dict`` and ``dcp.save``; ``dcp.load`` and ``set_state_dict``.
* **dcp from fshard**: ``fs.io.save_dcp`` and ``fs.io.load_dcp``, the same format without FSDP2.
* **torch.save**: each rank its own shards in one file, which no other number of ranks can read.

All of them sync their files to the disk. Files are read back from the page cache. Memory is the most that one rank's C
allocator has handed out during the call, above what it had before, as in ``memory.py``: a restored state counts.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import peers
import torch
import torch.distributed as dist
from common import Report, Row, arguments, middle, ratio, run_workers
from memory import LIBC, MIB, Watch, in_use
from model import Size, make, rows

import fshard as fs
from fshard import tree

RANKS = 4
FULL = Size(depth=12, width=768, heads=12, tokens=128, batch=2)
"""85 million parameters: with AdamW's buffers 1 GB in float32."""
QUICK = Size(depth=4, width=256, heads=4)
AGAINST_DCP, STALL = 1.0, 0.05
NAMES = ("fshard", "dcp", "dcp from fshard", "torch.save")


class Store(Protocol):
    """Something that keeps a state on disk."""

    def save(self, folder: Path) -> None:
        """Write it; the same on all ranks."""

    def restore(self, folder: Path) -> object:
        """Read it into something that can train on; what is returned is kept until the clock has stopped."""


class Ours:
    """fshard's own format."""

    def __init__(self, peer: peers.Fshard) -> None:
        self.peer, self.opt = peer, fs.optim.adamw(**peers.ADAMW)

    def save(self, folder: Path) -> None:
        """Files, hashes, manifest, rename."""
        with fs.Checkpointer(folder) as ckpt:
            ckpt.save(self.peer.state)

    def restore(self, folder: Path) -> object:
        """A new state."""
        with fs.Checkpointer(folder) as ckpt:
            return ckpt.restore(self.peer.plan, self.opt)


class OursAsDcp(Ours):
    """The format of torch.distributed.checkpoint, written and read by fshard."""

    def save(self, folder: Path) -> None:
        """A file a rank, and the list."""
        fs.io.save_dcp(self.peer.state, folder, self.opt)

    def restore(self, folder: Path) -> object:
        """A new state."""
        return fs.io.load_dcp(folder, self.peer.plan, self.opt)


class Dcp:
    """torch.distributed.checkpoint, as an FSDP2 job uses it."""

    def __init__(self, peer: peers.Torch) -> None:
        self.peer = peer

    def save(self, folder: Path) -> None:
        """As its documentation has it."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optim = get_state_dict(self.peer.module, self.peer.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=str(folder))

    def restore(self, folder: Path) -> object:
        """Into tensors of its own, as where a job starts: those that the job trains with are not counted twice."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        model, optim = get_state_dict(self.peer.module, self.peer.optimizer)
        state = tree_of_empty({"model": model, "optim": optim})
        dcp.load(state, checkpoint_id=str(folder))
        settings = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(self.peer.module, self.peer.optimizer, **settings)
        return state


class Plain:
    """``torch.save`` of what each rank holds."""

    def __init__(self, peer: peers.Fshard) -> None:
        self.peer = peer

    def save(self, folder: Path) -> None:
        """One file a rank."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {"params": self.peer.state.params, "opt": self.peer.state.opt_state}
        # Cloned: a view would take all of its buffer along, once for each leaf.
        own = {name: leaf.clone() for name, leaf in tree.paths(state)}
        with open(folder / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(own, file)
            file.flush()
            os.fsync(file.fileno())

    def restore(self, folder: Path) -> object:
        """A dict of shards."""
        return torch.load(folder / f"{dist.get_rank()}.pt", weights_only=True)


def tree_of_empty(value: Any) -> Any:
    """The same state dict with tensors of its own memory."""
    if isinstance(value, dict):
        return {key: tree_of_empty(item) for key, item in value.items()}
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def clocked(call: Callable[[], object]) -> float:
    """The seconds that the slowest rank takes; all begin together."""
    gc.collect()
    dist.barrier()
    begun = time.perf_counter()
    kept = call()
    took = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    del kept
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def weighed(call: Callable[[], object]) -> float:
    """The most bytes that a rank takes meanwhile."""
    gc.collect()
    dist.barrier()
    before, watch = in_use(), Watch()
    try:
        kept = call()
    finally:
        watch.close()
    most = torch.tensor(float(max(watch.most - before, 0)), dtype=torch.float64)
    del kept
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def stalls(peer: peers.Fshard, batch: torch.Tensor, folder: Path, steps: int) -> dict[str, list[float]]:
    """The times of steps, of asynchronous saves beside them, and of the steps during which these write.

    The update of a step waits for the next one, or for whoever reads the state before. Here it counts for its step:
    a save would be charged with what the next step is then spared.
    """
    out: dict[str, list[float]] = {"step": [], "save": [], "beside": []}

    def step() -> None:
        peer.step(batch)
        fs.settle(peer.state).finished()

    with fs.Checkpointer(folder, keep=1, async_=True) as ckpt:
        for number in range(2 * steps):
            out["step"].append(clocked(step))
            if number % 2:
                out["save"].append(clocked(lambda: ckpt.save(peer.state)))
                out["beside"].append(clocked(step))
                ckpt.wait()
    return {name: values[1:] if name != "step" else values[2:] for name, values in out.items()}


def work(args: argparse.Namespace) -> int:
    """One rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    size = Size(args.depth, args.width, args.heads, args.tokens, args.batch)
    with peers.process_group():
        batch = rows(size, 0, dist.get_rank())
        built = peers.build(("fshard", "fsdp2"), size)
        for peer in built.values():
            peer.step(batch)  # an optimizer of torch has no state before its first step
        ours, theirs = built["fshard"], built["fsdp2"]
        assert isinstance(ours, peers.Fshard) and isinstance(theirs, peers.Torch)
        stores: dict[str, Store] = {
            "fshard": Ours(ours),
            "dcp": Dcp(theirs),
            "dcp from fshard": OursAsDcp(ours),
            "torch.save": Plain(ours),
        }
        found: dict[str, Any] = {name: {"save": [], "restore": [], "memory": {}} for name in stores}
        for number in range(args.rounds + 2):
            for name in list(stores)[number % len(stores) :] + list(stores)[: number % len(stores)]:
                folder = Path(args.folder) / name.replace(" ", "-")
                measure = clocked if number else weighed
                for what, call in (("save", stores[name].save), ("restore", stores[name].restore)):
                    value = measure(lambda call=call, folder=folder: call(folder))
                    if not number:
                        found[name]["memory"][what] = value
                    elif number > 1:  # the first round makes communicators, threads and caches
                        found[name][what].append(value)
                dist.barrier()
                if dist.get_rank() == 0:
                    shutil.rmtree(folder)
                dist.barrier()
        found["stall"] = stalls(ours, batch, Path(args.folder) / "async", max(3, args.rounds // 2))
        if dist.get_rank() == 0:
            args.out.write_text(json.dumps(found))
        dist.barrier()
    return 0


def measure(args: argparse.Namespace) -> int:
    """Run the workers, report."""
    if not hasattr(LIBC, "mallinfo2"):
        print("checkpoint: skipped: the C library has no mallinfo2, which glibc has since 2.33")
        return 0
    size = QUICK if args.quick else FULL
    rounds = args.rounds or (3 if args.quick else 8)
    options = {name: value for name, value in asdict(size).items() if name != "vocabulary"}
    with tempfile.TemporaryDirectory(prefix="fshard-bench-", dir=args.folder) as folder:
        given = {"worker": 1, "rounds": rounds, "folder": folder, **options}
        found = run_workers(RANKS, None, given, script="checkpoint.py", timeout=3600)
    with torch.device("meta"):
        state = 3 * sum(p.numel() * p.element_size() for p in make(size).parameters())
    configuration = {"model": asdict(size), "ranks": RANKS, "rounds": rounds, "state MiB": state / MIB}
    report = Report("checkpoint", __doc__.splitlines()[0], configuration)
    stall = found.pop("stall")
    for what in ("save", "restore"):
        for under, target in (("dcp", AGAINST_DCP), ("torch.save", None)):
            pair = found["fshard"][what], found[under][what]
            report.rows.append(ratio(f"{what}: fshard / {under}", "wall", *pair, target))
        pair = found["dcp from fshard"][what], found["dcp"][what]
        report.rows.append(ratio(f"{what}: dcp from fshard / dcp", "wall", *pair))
        for name in NAMES:
            report.rows.append(middle(f"{what}: {name}", "MB/s", [state / 1e6 / s for s in found[name][what]]))
            above = found[name]["memory"][what] / (state / RANKS)
            report.rows.append(Row(f"{what}: {name}, memory / a rank's part of the state", "heap", above))
    step = statistics.median(stall["step"])
    report.rows.append(middle("async save / a step", "wall", [s / step for s in stall["save"]], STALL))
    report.rows.append(middle("a step beside a write / a step", "wall", [s / step for s in stall["beside"]]))
    report.medians = {**found, "stall": stall}
    return report.finish(args)


def options(cli: argparse.ArgumentParser) -> None:
    """What can be chosen, and what a worker is told."""
    cli.add_argument("--rounds", type=int, help="saves and restores of each peer")
    cli.add_argument("--folder", help="where checkpoints are written; the usual folder for temporary files by default")
    for name in ("worker", "depth", "width", "heads", "tokens", "batch"):
        cli.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    cli.add_argument("--out", type=Path, help=argparse.SUPPRESS)


if __name__ == "__main__":
    given = arguments(__doc__, options)
    sys.exit(work(given) if given.worker else measure(given))
