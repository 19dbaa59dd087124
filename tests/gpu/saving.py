"""An asynchronous save while training: losses do not change, and what is saved is the state of its step.

Attention is made of plain operators: the backward of its memory-efficient kernel adds in no fixed order where
``use_deterministic_algorithms`` only warns, so two runs would differ. States are compared with those of their own run.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from fshard import tree
from tests.gpu.models import TINY, Size, alone, job, rows
from tests.gpu.place import Clock, Found, Place

LARGE = Size(depth=8, width=1024, heads=16, tokens=256, batch=8, vocabulary=8192)
STEPS, AT = 8, (3, 5)
"""Steps, and those after which the state is saved."""


def run(place: Place, found: Found) -> None:
    """Train with saves and without."""
    place.deterministic()
    size = place.of(LARGE, TINY)
    if place.dry:
        found.leave("page-locked memory, and copies beside compute")
    want, _, quiet = _train(size, place, None)
    with tempfile.TemporaryDirectory() as folder:
        got, kept, busy = _train(size, place, Path(folder))
        found.check(got == want, f"losses with saves {got}, without {want}")
        made = job(size, alone(place.device))
        with fs.Checkpointer(folder, keep=None) as checkpoints:
            for at in AT:
                state = fs.settle(checkpoints.restore(made.plan, made.opt, step=at))
                same = [torch.equal(a, b) for a, b in zip(_leaves(state), kept[at], strict=True)]
                found.check(all(same), f"the state of step {at}: {same.count(False)} of {len(same)} leaves differ")
    found.number("ms of a step", {"without saves": quiet["step"], "after a save": busy["after"]})
    found.number("ms of a call of save", busy["save"])


def _leaves(state: fs.TrainState) -> list[torch.Tensor]:
    return [leaf.detach().cpu().clone() for leaf in (*tree.leaves(state.params), *tree.leaves(state.opt_state))]


def _train(size: Size, place: Place, folder: Path | None) -> tuple[list[float], dict[int, Any], dict[str, Any]]:
    """Losses, the states to be saved, and times in milliseconds."""
    made = job(size, alone(place.device))
    state, step, losses = made.start(), made.step(), []
    kept: dict[int, Any] = {}
    times: dict[str, Any] = {"step": [], "after": [], "save": []}
    checkpoints = fs.Checkpointer(folder, keep=None, async_=True) if folder else None
    for number in range(1, STEPS + 1):
        batch = rows(size, number, made.mesh)
        place.synchronize()
        clock = Clock()
        with sdpa_kernel(SDPBackend.MATH):
            state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
        place.synchronize()
        times["after" if folder and number - 1 in AT else "step"].append(1e3 * clock.seconds())
        if number not in AT:
            continue
        state = fs.settle(state)
        kept[number] = _leaves(state)
        if checkpoints is not None:
            clock = Clock()
            checkpoints.save(state)
            times["save"].append(1e3 * clock.seconds())
    if checkpoints is not None:
        checkpoints.close()
    return losses, kept, times
