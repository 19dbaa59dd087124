"""One rank of ``auto.py``: lets ``auto`` settle, and then makes steps of all policies in turns."""

import argparse
import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from auto_models import build

import fshard as fs

MOST = 60
"""Steps in which ``auto`` must settle to be timed."""

WARM = 3
"""Steps of a fixed policy that are not timed."""


def policies() -> dict[str, fs.Policy]:
    """Those that ``auto`` is compared with."""
    return {
        "default": fs.Policy(),
        "prefetch 0": fs.Policy(prefetch=0, reduces=1),
        "prefetch 1": fs.Policy(prefetch=1, reduces=1),
        "prefetch 3": fs.Policy(prefetch=3),
        "reduces 1": fs.Policy(reduces=1),
        "keep 2": fs.Policy(reshard=fs.keep(last=2)),
        "keep all": fs.Policy(reshard=False),
        "keep all, prefetch 1": fs.Policy(prefetch=1, reshard=False),
    }


def case(name: str, seconds: float, mesh: fs.Mesh) -> dict[str, Any]:
    """One model: the choices of ``auto``, and the times of all. Collective."""
    opt = fs.optim.adamw(1e-3)
    model, loss, make_batch = build(name)
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))])
    make, batch = partial(fs.make_train_step, loss, opt, plan), make_batch(0, mesh.rank)
    steps = {label: make(schedule=policy) for label, policy in policies().items()}
    peaks = {label: step.trace(batch).footprint.peak_bytes for label, step in steps.items()}
    limits = {"auto": None, "auto within a limit": (min(peaks.values()) + max(peaks.values())) // 2}
    choices = {label: make(schedule=fs.Auto(memory=limit)) for label, limit in limits.items()}
    states = {label: fs.init_state(plan, opt, seed=0) for label in {**steps, **choices}}
    first = {label: settle(step, states, label, batch) for label, step in choices.items()}
    times = in_turns({**steps, **choices}, states, batch, seconds)
    return {
        "fixed": {label: {"seconds": times[label], "peak": peaks[label]} for label in steps},
        "auto": {
            label: {
                "seconds": times[label],
                "limit": limits[label],
                "settled": len(first[label]),
                "first": first[label],
                "policy": str(step.schedule.policy),
            }
            for label, step in choices.items()
        },
    }


def settle(step: Any, states: Any, label: str, batch: Any) -> list[float]:
    """The seconds of each step until ``auto`` has chosen."""
    taken = []
    while len(taken) < MOST and not (taken and step.trace(batch).choice.settled):
        taken.append(one(step, states, label, batch))
    return slowest(taken)


def in_turns(steps: Any, states: Any, batch: Any, seconds: float) -> dict[str, float]:
    """The lower quartile of the steps of each, by the slowest rank."""
    for label, step in steps.items():
        for _ in range(WARM):
            one(step, states, label, batch)
    taken: dict[str, list[float]] = {label: [] for label in steps}
    begun, going = time.perf_counter(), True
    while going:
        for label, step in steps.items():
            one(step, states, label, batch)  # what the one before left in caches is not of this one
            taken[label].append(one(step, states, label, batch))
        going = slowest([time.perf_counter() - begun])[0] < seconds
    return {label: sorted(slowest(each))[len(each) // 4] for label, each in taken.items()}


def one(step: Any, states: Any, label: str, batch: Any) -> float:
    """The seconds of a step."""
    dist.barrier()
    begun = time.perf_counter()
    states[label], _metrics = step(states[label], batch)
    return time.perf_counter() - begun


def slowest(seconds: list[float]) -> list[float]:
    """Each number as the rank has it that has most. Collective."""
    own = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.tolist()


def main() -> int:
    """Run, gather, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--models", nargs="+", default=["gpt"])
    cli.add_argument("--seconds", type=float, default=20)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        found = {name: case(name, args.seconds, mesh) for name in args.models}
        if mesh.rank == 0:
            args.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
