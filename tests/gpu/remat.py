"""Recomputation with collectives by name, in steps and outside of them, where autograd has a thread for the device."""

from typing import Any

import fshard as fs
from tests.device import cases, own
from tests.gpu.place import Found, Place

BOUND = 2e-4
"""How far numbers may be from those of the CPU, relatively."""


def run(place: Place, found: Found) -> None:
    """Train so on one and three played ranks; and differentiate outside of steps."""
    device = str(place.device)
    if place.dry:
        device = own.found() or "cpu"
        found.leave(f"a GPU: the device is {device}" + (", whose backwards have a thread" if device != "cpu" else ""))
    policies: dict[str, Any] = {"all": "all", "dots": fs.checkpoint_policies.dots}
    for ranks in (1, 3):
        for name, remat in policies.items():
            want = cases.on("cpu", ranks, lambda mesh, remat=remat: cases.trained(mesh, cases.named, remat=remat))
            got = cases.on(device, ranks, lambda mesh, remat=remat: cases.trained(mesh, cases.named, remat=remat))
            for kind in ("losses", "norms"):
                for number, (mine, right) in enumerate(zip(got[kind], want[kind], strict=True)):
                    found.near(f"{ranks} ranks, {name}: {kind} of step {number}", mine, right, BOUND)
    for name, policy in {"all": None, "dots": fs.checkpoint_policies.dots}.items():
        if device != "cpu":
            wrong = cases.named_outside(policy, device)
            found.check(not wrong, f"outside of steps, {name}: {'; '.join(wrong)}")
    for ranks in (1, 3):
        wrong = cases.failing(ranks, device, BOUND)
        found.check(not wrong, f"a backward that raises on one of {ranks} ranks: {'; '.join(wrong)}")
