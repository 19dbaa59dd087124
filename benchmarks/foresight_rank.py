"""One rank of ``foresight.py``: calibrates, and makes steps of all cases in turns."""

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from calm import Calm
from foresight_models import build

import fshard as fs

TRIES = 3
"""Turns that are taken at most, for each that is to count."""

CALIBRATED = 6
"""Steps of a calibration."""

SPAN = 0.2
"""Seconds that a turn takes, if a step is not longer."""

AUTO = 7
"""Steps of ``schedule="auto"`` before it has chosen."""

Timed = tuple[float, float]
"""Seconds of a step, and of the fixed work before and after."""

LONG = 0.5
"""A step of so many seconds is timed without one before it: what it finds in caches is little of it."""


def policies() -> dict[str, fs.Policy]:
    """Those that are compared."""
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


def meshed(args: argparse.Namespace) -> tuple[fs.Mesh, Any, Any]:
    """The mesh, the tactic and the spec of the batch."""
    if args.hsdp:
        mesh = fs.make_mesh((2, -1), ("replica", "shard"), shared_memory=args.shared)
        return mesh, fs.fsdp("shard"), fs.P(("replica", "shard"))
    return fs.make_mesh((-1,), ("shard",), shared_memory=args.shared), fs.fsdp("shard"), fs.P("shard")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Costs of each model, and the schedules and times of all cases."""
    mesh, tactic, spec = meshed(args)
    found: dict[str, Any] = {"costs": {}, "cases": {}, "disturbed": 0, "turns": 0}
    opt = fs.optim.adamw(1e-3)
    with mesh:
        calm = Calm(args.best)
        for name in args.models:
            for times in args.accumulate:
                model, loss, batch = build(name, times)
                plan = fs.make_plan(model, mesh, [(".*", tactic)], batch=spec)
                make = partial(fs.make_train_step, loss, opt, plan, accumulate=times)
                given = batch(0, mesh.rank)
                steps = {label: make(schedule=policies()[label]) for label in args.policies}
                peaks = {label: step.trace(given).footprint.peak_bytes for label, step in steps.items()}
                limits = limited(peaks) if args.auto else {}
                steps |= {label: make(schedule=fs.Auto(memory=limit)) for label, limit in limits.items()}
                states = {label: fs.init_state(plan, opt, seed=0) for label in steps}
                turns = Turns(steps, states, given, calm)
                rows = turns.take(args.rounds)
                for label, step in steps.items():
                    found["cases"][f"{name}|{times}|{label}"] = {
                        "times": [seconds for seconds, _ in rows[label]],
                        "work": median(work for _, work in rows[label]),
                        "schedule": str(step.schedule),
                        "policy": str(step.schedule.policy),
                        "peak": step.trace(given).footprint.peak_bytes,
                        "limit": limits.get(label),
                    }
                found["disturbed"] += turns.disturbed
                found["turns"] += turns.taken
            if args.calibrate:
                model, loss, batch = build(name)
                plan = fs.make_plan(model, mesh, [(".*", tactic)], batch=spec)
                made, work = costs(fs.make_train_step(loss, opt, plan), batch(0, mesh.rank), calm)
                found["costs"][name] = {"costs": made.as_json(), "work": work}
        parts: list[Any] = [None] * mesh.size
        dist.all_gather_object(parts, {key: case["times"] for key, case in found["cases"].items()})
    for key, case in found["cases"].items():
        case["times"] = [max(column) for column in zip(*(part[key] for part in parts), strict=True)]
    return {**found, "best": calm.best}


def limited(peaks: Mapping[str, int]) -> dict[str, int | None]:
    """The limits on memory under which a policy is chosen: none, and one that half of the policies exceed."""
    return {"auto": None, "auto within a limit": (min(peaks.values()) + max(peaks.values())) // 2}


def costs(step: Any, batch: Any, calm: Calm) -> tuple[Any, float]:
    """Costs that were measured in calm, and the seconds of the fixed work beside them."""
    found: list[tuple[float, Any]] = []
    for _ in range(TRIES):
        calm.wait()
        before = calm.seconds
        made = step.calibrate(batch, rounds=CALIBRATED)
        steady = calm()
        found.append(((before + calm.seconds) / 2, made))
        if steady:
            break
    work, made = found[-1] if steady else min(found, key=lambda each: each[0])
    return made, work


class Turns:
    """Steps of all cases in turns. A turn is one step that is not timed, and some that are, whose mean counts."""

    def __init__(self, steps: Any, states: Any, batch: Any, calm: Calm) -> None:
        self.steps, self.states, self.batch, self.calm = steps, states, batch, calm
        self.disturbed = self.taken = 0
        self.times: dict[str, list[Timed]] = {label: [] for label in steps}
        # ``auto`` measures in its first steps.
        first = max(self._turn(label, 1, AUTO if label.startswith("auto") else 1) for label in steps)
        slowest = torch.tensor([first], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        self.count = min(max(int(SPAN / slowest.item()), 1), 4)
        self.before = int(slowest.item() < LONG)

    def take(self, rounds: int) -> dict[str, list[Timed]]:
        """Steps in the turns that nothing disturbed, or in all if there are too few of these."""
        every: dict[str, list[Timed]] = {label: [] for label in self.steps}
        calm = False
        for number in range(rounds * TRIES):
            if number >= rounds and not self.calm.patience:
                break  # there is no calm to be had
            for label in self.steps:
                if len(self.times[label]) < rounds:
                    if not calm:
                        self.calm.wait()
                    before, seconds = self.calm.seconds, self._turn(label, self.count, self.before)
                    calm = self.calm()
                    every[label].append((seconds, (before + self.calm.seconds) / 2))
                    self.times[label] += [every[label][-1]] if calm else []
                    self.disturbed += not calm
                    self.taken += 1
        return {label: times if len(times) == rounds else every[label] for label, times in self.times.items()}

    def _turn(self, label: str, count: int, before: int) -> float:
        for number in range(before + count):
            if number == before:
                dist.barrier()
                begun = time.perf_counter()
            self.states[label], _ = self.steps[label](self.states[label], self.batch)
        return (time.perf_counter() - begun) / count


def bind() -> None:
    """Keep this rank on one processor, as launchers of clusters do.

    Where ranks share processors, they change from one to another at every other wait, and take a tenth longer for it.
    """
    every = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {every[int(os.environ.get("RANK", "0")) % len(every)]})


def main() -> int:
    """Run, gather, write."""
    bind()
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--models", nargs="+", default=["gpt"])
    cli.add_argument("--policies", nargs="*", default=[*policies()])
    cli.add_argument("--accumulate", type=int, nargs="*", default=[1])
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--hsdp", type=int, default=0)
    cli.add_argument("--auto", type=int, default=0)
    cli.add_argument("--shared", type=int, default=1)
    cli.add_argument("--best", type=float, default=0.0)
    cli.add_argument("--calibrate", type=int, default=1)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = measure(args)
    if int(os.environ.get("RANK", "0")) == 0:
        args.out.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
