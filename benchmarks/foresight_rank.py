"""One rank of ``foresight.py``: calibrates, and makes steps of all cases in turns."""

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from foresight_models import build

import fshard as fs

WARM = 3
"""Steps of each case before those that are timed."""


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
    found: dict[str, Any] = {"costs": {}, "cases": {}}
    opt = fs.optim.adamw(1e-3)
    with mesh:
        for name in args.models:
            for times in args.accumulate:
                model, loss, batch = build(name, times)
                plan = fs.make_plan(model, mesh, [(".*", tactic)], batch=spec)
                auto = {"auto": fs.Auto()} if args.auto else {}
                steps = {
                    label: fs.make_train_step(loss, opt, plan, schedule=policy, accumulate=times)
                    for label, policy in {**policies(), **auto}.items()
                    if label in args.policies or not args.policies or label == "auto"
                }
                states = {label: fs.init_state(plan, opt, seed=0) for label in steps}
                rows = interleave(steps, states, batch, args.rounds, mesh.rank)
                for label, step in steps.items():
                    case = {"times": rows[label], "schedule": str(step.schedule), "policy": str(step.schedule.policy)}
                    found["cases"][f"{name}|{times}|{label}"] = case
                if times == 1 and args.calibrate:
                    costs = steps["default"].calibrate(batch(0, mesh.rank), rounds=args.rounds)
                    found["costs"][name] = costs.as_json()
        parts: list[Any] = [None] * mesh.size
        dist.all_gather_object(parts, {key: case["times"] for key, case in found["cases"].items()})
    for key, case in found["cases"].items():
        case["times"] = [max(column) for column in zip(*(part[key] for part in parts), strict=True)]
    return found


def interleave(steps: Any, states: Any, batch: Any, rounds: int, rank: int) -> dict[str, list[float]]:
    """Seconds of each step, in turns. A step's time is that of two in a row, halved: updates wait for the next."""
    times: dict[str, list[float]] = {label: [] for label in steps}
    for number in range(WARM + rounds):
        x = batch(number, rank)
        for label, step in steps.items():
            extra = 6 if label == "auto" and number == 0 else 0  # it measures in its first steps
            for _ in range(1 + extra):
                states[label], _ = step(states[label], x)
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(2):
                states[label], _ = step(states[label], x)
            if number >= WARM:
                times[label].append((time.perf_counter() - begun) / 2)
    return times


def main() -> int:
    """Run, gather, write."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--models", nargs="+", default=["gpt"])
    cli.add_argument("--policies", nargs="*", default=[])
    cli.add_argument("--accumulate", type=int, nargs="+", default=[1])
    cli.add_argument("--rounds", type=int, default=5)
    cli.add_argument("--hsdp", type=int, default=0)
    cli.add_argument("--auto", type=int, default=0)
    cli.add_argument("--shared", type=int, default=1)
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
