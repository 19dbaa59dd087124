"""Training on one GPU against the CPU: losses and norms of every step, with all that a step can do."""

from typing import Any

import torch

import fshard as fs
from tests.gpu.models import TINY, Job, Size, alone, job, losses
from tests.gpu.place import Found, Place

BF16 = fs.Precision(torch.bfloat16, torch.bfloat16)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "plain": ({}, {}, 2e-4),
    "clipping, two microbatches": ({}, {"clip_norm": 0.5, "accumulate": 2}, 2e-4),
    "clipping by rule": ({}, {"clip_norm": [(r"blocks.*", 0.1), (r".*", 0.3)]}, 2e-4),
    "remat": ({}, {"remat": "all"}, 2e-4),
    "update in backward": ({}, {"schedule": fs.Policy(update="in_backward")}, 2e-4),
    "loss scale": ({}, {"loss_scale": fs.LossScale()}, 2e-4),
    "state in host memory": ({"opt_memory_kind": "pinned_host", "update_on": "device"}, {}, 2e-4),
    "updated on the host": ({"opt_memory_kind": "pinned_host", "update_on": "host"}, {}, 2e-4),
    "all in host memory": ({"memory_kind": "pinned_host"}, {}, 2e-4),
    "bfloat16": ({"precision": BF16}, {}, 2e-2),
}
"""By name: of the plan, of the step, and how far losses may be apart, relatively."""


def run(place: Place, found: Found) -> None:
    """Train on both, and compare."""
    torch.set_float32_matmul_precision("highest")
    size, steps = place.of((Size(), 30), (TINY, 3), (TINY, 2))
    if place.dry:
        found.leave("a comparison: both runs were on the CPU, with unpinned memory in place of pinned memory")
    names = [*CASES][:: place.of(1, 1, 6)]
    for name in names:
        with found.trying(name):
            _compare(place, found, name, size, steps)


def _compare(place: Place, found: Found, name: str, size: Size, steps: int) -> None:
    plan, options, bound = CASES[name]
    want, norms, _ = losses(on(torch.device("cpu"), size, plan), steps, **options)
    got, found_norms, state = losses(on(place.device, size, plan), steps, **options)
    fs.settle(state)
    worst = max(range(steps), key=lambda i: abs(got[i] - want[i]))
    found.near(f"{name}: loss of step {worst}", got[worst], want[worst], bound)
    if bound < 1e-2:
        worst = max(range(steps), key=lambda i: abs(found_norms[i] - norms[i]))
        found.near(f"{name}: norm of step {worst}", found_norms[worst], norms[worst], 50 * bound)
    found.check(got[-1] < got[0], f"{name}: the loss does not fall: {got[0]} to {got[-1]}")


def on(device: torch.device, size: Size, plan: dict[str, Any]) -> Job:
    """The job on a device; page-locked memory only where there is a GPU."""
    kinds = {name: kind.replace("pinned", "unpinned") if _pinned(kind, device) else kind for name, kind in plan.items()}
    return job(size, alone(device), **kinds)


def _pinned(kind: Any, device: torch.device) -> bool:
    return kind == "pinned_host" and device.type == "cpu"
