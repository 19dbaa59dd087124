"""One rank of ``outer.py``: rounds of outer steps, and of steps of the same replicas that exchange nothing."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import SMALL, loss_of, make, rows
from peers import ADAMW
from worker import sent

import fshard as fs

SHIFT = 3
"""Steps before the first round, so that no fragment is under way between two rounds."""


def measure(args: argparse.Namespace, mesh: fs.Mesh) -> dict[str, Any]:
    """Seconds a step of each kind in each round, and what went over the link in each outer step."""
    model = fs.split(make(SMALL), units=("blocks.*",))

    def loss_fn(params: dict[str, Any], batch: torch.Tensor) -> torch.Tensor:
        return loss_of(model.apply(params, batch[:, :-1]), batch)

    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P(("replica", "data")))
    inner = fs.make_train_step(loss_fn, fs.optim.adamw(**ADAMW), plan)
    given = {"wire": args.wire, "fragments": args.fragments, "delay": args.delay}
    outer = fs.outer(inner, fs.optim.sgd(0.7, momentum=0.9, nesterov=True), every=args.every, **given)
    alone = fs.make_train_step(loss_fn, fs.optim.adamw(**ADAMW), outer.plan)
    states = [fs.init_state(step.plan, step.opt, params=model.params) for step in (outer, alone)]
    found: dict[str, Any] = {"outer": [], "inner": [], "sent": []}
    for number in range(SHIFT):
        states[0], _ = outer(states[0], rows(SMALL, number, mesh.rank))
    for turn in range(args.rounds + 1):
        for name, step, at in (("outer", outer, 0), ("inner", alone, 1)):
            dist.barrier()
            seen, begun = [sent()], time.perf_counter()
            for number in range(args.every):
                states[at], metrics = step(states[at], rows(SMALL, number, mesh.rank))
                float(metrics.loss)
                seen.append(sent())
            seconds = (time.perf_counter() - begun) / args.every
            if turn:  # the first round traces, and makes communicators
                found[name].append(seconds)
                if name == "outer":
                    found["sent"].append([b - a for a, b in zip(seen, seen[1:], strict=False)])
    trained = sum(group.numel for group in plan.groups)
    synchronous = trained * 4  # an exact sum of two replicas: each sends what it has once
    payload = sum(outer.sent(number) for number in range(args.every + 1, 2 * args.every + 1))
    return {**found, "synchronous": synchronous, "payload": payload}


def main() -> int:
    """Run, gather, write: of each round the slower rank counts, and the host that has sent more."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, kind in (("every", int), ("fragments", int), ("delay", int), ("rounds", int), ("wire", str)):
        cli.add_argument(f"--{name}", type=kind, required=True)
    cli.add_argument("--out", type=Path, required=True)
    args = cli.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with fs.make_mesh((2, -1), ("replica", "data")) as mesh:
        parts: list[Any] = [None] * mesh.size
        dist.all_gather_object(parts, measure(args, mesh))
    if mesh.rank == 0:
        slower = {
            name: [max(each) for each in zip(*(part[name] for part in parts), strict=True)]
            for name in ("outer", "inner")
        }
        most = max(parts, key=lambda part: sum(map(sum, part["sent"])))
        args.out.write_text(json.dumps({**most, **slower}))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
