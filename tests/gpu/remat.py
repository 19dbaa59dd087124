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
    for ranks in place.of((1, 3), (1, 3), (3,)):
        for name, remat in policies.items():
            with found.trying(f"{ranks} ranks, {name}"):
                _compare(found, f"{ranks} ranks, {name}", device, ranks, remat)
    for name, policy in {"all": None, "dots": fs.checkpoint_policies.dots}.items():
        with found.trying(f"outside of steps, {name}"):
            wrong = cases.named_outside(policy, device) if device != "cpu" else []
            found.check(not wrong, f"outside of steps, {name}: {'; '.join(wrong)}")
    for ranks in place.of((1, 3), (1, 3), (3,)):
        with found.trying(f"a backward that raises on one of {ranks} ranks"):
            wrong = cases.failing(ranks, device, BOUND)
            found.check(not wrong, f"a backward that raises on one of {ranks} ranks: {'; '.join(wrong)}")


def _compare(found: Found, name: str, device: str, ranks: int, remat: Any) -> None:
    want = cases.on("cpu", ranks, lambda mesh: cases.trained(mesh, cases.named, remat=remat))
    got = cases.on(device, ranks, lambda mesh: cases.trained(mesh, cases.named, remat=remat))
    for kind in ("losses", "norms"):
        for number, (mine, right) in enumerate(zip(got[kind], want[kind], strict=True)):
            found.near(f"{name}: {kind} of step {number}", mine, right, BOUND)
