"""A step waits for its device at its consensus alone: anything else that would is an error of PyTorch."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.runtime.steps import readings
from tests.device.waits import KINDS, going
from tests.gpu.models import TINY, Size, job, rows
from tests.gpu.place import Found, Place

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"accumulate": 2},
    "clipping by rule": {"clip_norm": [(r"blocks.*", 0.1), (r".*", 0.3)]},
    "remat": {"remat": "all", "clip_norm": 0.1},
    "loss scale": {"loss_scale": fs.LossScale()},
    "in backward": {"schedule": fs.Policy(update="in_backward")},
    "graphs": {"compile": "fx"},
}


def run(place: Place, found: Found) -> None:
    """Steps of a GPT on one played rank and on two, and small steps of every kind that reads its device once."""
    size = place.of(Size(dropout=0.1), TINY)
    if place.dry:
        found.leave("PyTorch's own look-out for waits, which is for CUDA: reads were counted instead")
    for name in [*OPTIONS][:: place.of(1, 1, 4)]:
        options = OPTIONS[name]
        for ranks in (1, 2):
            mesh = fs.virtual_mesh((ranks,), ("data",), device=place.device)
            _third(place, found, f"{name}, {ranks} ranks", mesh, functools.partial(_steps, size=size, options=options))
    for name in [*KINDS][:: place.of(1, 8, 40)]:
        if KINDS[name].reads == 1:
            _third(place, found, name, fs.virtual_mesh(*KINDS[name].axes, device=place.device), KINDS[name].make)


def _third(
    place: Place, found: Found, name: str, mesh: Any, make: Callable[[fs.Mesh], Callable[[int], object]]
) -> None:
    """Watch the third step of all ranks."""

    def warm() -> Callable[[int], object]:
        step = make(mesh)
        for number in range(2):
            step(number)
        return step

    with found.trying(name):
        steps = mesh.run(warm)
        with watched(place) as reads:
            mesh.run(lambda: steps[mesh.rank](2))
        each = len(reads) / mesh.size
        found.check(each == 1, f"{name}: {each:g} reads of the device in a step")


def _steps(mesh: fs.Mesh, size: Size, options: dict[str, Any]) -> Callable[[int], object]:
    """The steps of a rank."""
    made = job(size, mesh.here)
    batch = rows(size, 0, mesh)
    return going(made.step(**options), made.start(), lambda number: batch)


@contextmanager
def watched(place: Place) -> Iterator[list[int]]:
    """Inside, a wait for the device is an error, but in the consensus. Its reads are noted."""
    reads: list[int] = []
    reading = readings.read

    def read(values: Sequence[Tensor | float]) -> Iterator[float]:
        reads.append(len(values))
        _watch(place, "default")
        try:
            return reading(values)
        finally:
            _watch(place, "error")

    with pytest.MonkeyPatch.context() as change:
        change.setattr(readings, "read", read)
        place.synchronize()
        _watch(place, "error")
        try:
            yield reads
        finally:
            _watch(place, "default")


def _watch(place: Place, how: str) -> None:
    if not place.dry:
        torch.cuda.set_sync_debug_mode(how)
