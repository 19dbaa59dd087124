"""One rank of ``foresight.py``: calibrates, and makes steps of all cases in turns."""

import argparse
import fcntl
import itertools
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from foresight_models import build

import fshard as fs

REST = 0.05
"""Seconds between two turns of a job, in which another one may begin."""

LOOK = 0.01
"""Seconds between two looks at whether other jobs have come."""

SPAN = 0.25
"""Seconds that a turn takes, if a step is not longer."""

AUTO = 240
"""Steps of ``schedule="auto"`` at most, before it has chosen."""

LONG = 0.15
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
    found: dict[str, Any] = {"costs": [], "cases": {}}
    opt = fs.optim.adamw(1e-3)
    with mesh:
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
                tell(args.turns, times)
                for label in limits:
                    with alone(args.turns):
                        states[label] = settled(steps[label], states[label], given)
                begun, turns = time.time(), Turns(steps, states, given, args.turns)
                times_of = turns.take(args.seconds * times**0.5 / sum(each**0.5 for each in args.accumulate))
                for label, step in steps.items():
                    found["cases"][f"{name}|{times}|{label}"] = {
                        "times": times_of[label],
                        "span": [begun, time.time()],
                        "schedule": str(step.schedule),
                        "policy": str(step.schedule.policy),
                        "peak": step.trace(given).footprint.peak_bytes,
                        "limit": limits.get(label),
                    }
            if args.calibrate:
                calibrate(name, mesh, tactic, spec, args, found)
        parts: list[Any] = [None] * mesh.size
        dist.all_gather_object(parts, {key: case["times"] for key, case in found["cases"].items()})
    for key, case in found["cases"].items():
        case["times"] = [max(column) for column in zip(*(part[key] for part in parts), strict=True)]
    return found


@contextmanager
def alone(turns: Path) -> Iterator[None]:
    """Have the machine, while other jobs wait for their turns. Collective."""
    with (turns / "turn").open("w") as file:
        if dist.get_rank() == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
        dist.barrier()
        yield
        dist.barrier()
    time.sleep(REST)


def calibrate(name: str, mesh: fs.Mesh, tactic: Any, spec: Any, args: argparse.Namespace, found: Any) -> None:
    """Calibrate again and again until the cases are over, with as many microbatches as they have at that time."""
    made: dict[int, Any] = {}
    beside = Beside(args.turns, args.job, args.calibrate)
    while not (found["costs"] and over(args.turns)):
        times = told(args.turns)
        if times not in made:
            model, loss, batch = build(name, times)
            plan = fs.make_plan(model, mesh, [(".*", tactic)], batch=spec)
            made[times] = fs.make_train_step(loss, fs.optim.adamw(1e-3), plan, accumulate=times), batch(0, mesh.rank)
        step, given = made[times]
        with beside.alone():
            begun = time.perf_counter()
            costs = step.calibrate(given, processors=1 / args.calibrate)
            found["costs"].append({"costs": costs.as_json(), "at": time.time(), "accumulate": times})
            spent = time.perf_counter() - begun
        time.sleep(spent)  # as much time is for the others
    beside.leave()


def tell(turns: Path, times: int) -> None:
    """Tell other jobs that the cases have so many microbatches from now on. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        (turns / f"microbatches {time.time()} {times}").touch()


def told(turns: Path) -> int:
    """The microbatches that the cases have now, by rank 0; 1 before they have said so. Collective."""
    names = sorted(turns.glob("microbatches *"), key=lambda path: float(path.name.split()[1]))
    latest = int(names[-1].name.split()[2]) if names and dist.get_rank() == 0 else 1
    return int(most(float(latest)))


class Beside:
    """Jobs that take their turns together. The first one waits for its turn, and lets the others begin.

    Args:
        turns: the folder by which jobs take turns.
        job: the number of this one.
        jobs: how many there are.
    """

    def __init__(self, turns: Path, job: int, jobs: int) -> None:
        self.turns, self.job, self.jobs = turns, job, jobs
        self.number = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the machine together, while other jobs wait for their turns. Collective."""
        self.number += 1
        with alone(self.turns) if self.job == 0 else nullcontext():
            self._meet("begin")
            yield
            self._meet("end")

    def leave(self) -> None:
        """Let the others go on without this one. Collective."""
        dist.barrier()
        (self.turns / f"left {self.job}").touch()

    def _meet(self, where: str) -> None:
        """Wait until all jobs have come here, or have left."""
        dist.barrier()
        if dist.get_rank() == 0:
            (self.turns / f"{where} {self.number} {self.job}").touch()
            for job in range(self.jobs):
                while not any((self.turns / name).exists() for name in (f"{where} {self.number} {job}", f"left {job}")):
                    time.sleep(LOOK)
        dist.barrier()


def over(turns: Path) -> bool:
    """Whether the jobs that others take turns with are over, by rank 0. Collective."""
    return bool(most(float((turns / "over").exists())))


def settled(step: Any, state: Any, batch: Any) -> Any:
    """The state after the steps in which ``schedule="auto"`` times policies."""
    for _ in range(AUTO):
        state, _ = step(state, batch)
        if step.trace(batch).choice.settled:
            return state
    raise RuntimeError(f"schedule='auto' has not chosen in {AUTO} steps")


def limited(peaks: Mapping[str, int]) -> dict[str, int | None]:
    """The limits on memory under which a policy is chosen: none, and one that half of the policies exceed."""
    return {"auto": None, "auto within a limit": (min(peaks.values()) + max(peaks.values())) // 2}


class Turns:
    """Steps of all cases in turns, each after one that is not timed. Collective: all ranks take the same ones."""

    def __init__(self, steps: Any, states: Any, batch: Any, turns: Path) -> None:
        self.steps, self.states, self.batch, self.turns = steps, states, batch, turns
        with alone(turns):
            slowest = most(max(self._turn(label, 1, 1)[0] for label in steps))
        self.count = max(int(SPAN / slowest), 1)
        self.before = int(slowest < LONG)

    def take(self, seconds: float) -> dict[str, list[float]]:
        """The seconds of each step of each case."""
        times: dict[str, list[float]] = {label: [] for label in self.steps}
        order, spent = [*self.steps], 0.0
        while spent < seconds:
            with alone(self.turns):
                begun = time.perf_counter()
                for label in order:
                    times[label] += self._turn(label, self.count, self.before)
                spent += most(time.perf_counter() - begun)
            order = [*order[1:], order[0]]
        return times

    def _turn(self, label: str, count: int, before: int) -> list[float]:
        dist.barrier()
        ends = []
        for _ in range(before + count):
            ends.append(time.perf_counter())
            self.states[label], _metrics = self.steps[label](self.states[label], self.batch)
        ends.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(ends)][before:]


def most(seconds: float) -> float:
    """The most that a rank has. Collective."""
    own = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(own, dist.ReduceOp.MAX)
    return own.item()


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
    cli.add_argument("--seconds", type=float, default=90)
    cli.add_argument("--hsdp", type=int, default=0)
    cli.add_argument("--auto", type=int, default=0)
    cli.add_argument("--turns", type=Path, required=True, help="the folder by which jobs take turns")
    cli.add_argument("--shared", type=int, default=1)
    cli.add_argument("--calibrate", type=int, default=1, help="jobs that calibrate side by side; 0 for none")
    cli.add_argument("--job", type=int, default=0, help="the number of this one")
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
