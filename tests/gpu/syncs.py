"""A step waits for its device at its consensus alone: anything else that would is an error of PyTorch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.runtime.steps import consensus
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
    """Steps of one played rank and of two."""
    size = place.of(Size(dropout=0.1), TINY)
    if place.dry:
        found.leave("PyTorch's own look-out for waits, which is for CUDA: reads were counted instead")
    for name in [*OPTIONS][:: place.of(1, 1, 4)]:
        options = OPTIONS[name]
        for ranks in (1, 2):
            with found.trying(f"{name}, {ranks} ranks"):
                mesh = fs.virtual_mesh((ranks,), ("data",), device=place.device)
                warm = mesh.run(_warm, mesh, size, options)
                with watched(place) as reads:
                    mesh.run(lambda mesh=mesh, warm=warm: warm[mesh.rank]())
                each = len(reads) / ranks
                found.check(each == 1, f"{name}, {ranks} ranks: {each:g} reads of the device in a step")


def _warm(mesh: fs.Mesh, size: Size, options: dict[str, Any]) -> Callable[[], object]:
    """Two steps of a rank, and what makes a third."""
    made = job(size, mesh.here)
    state, step, batch = made.start(), made.step(**options), rows(size, 0, mesh)
    for _ in range(2):
        state, _ = step(state, batch)
    return lambda: step(state, batch)


@contextmanager
def watched(place: Place) -> Iterator[list[int]]:
    """Inside, a wait for the device is an error, but in the consensus. Its reads are noted."""
    reads: list[int] = []
    reading = consensus.read

    def read(values: Sequence[Tensor | float]) -> Iterator[float]:
        reads.append(len(values))
        _watch(place, "default")
        try:
            return reading(values)
        finally:
            _watch(place, "error")

    with pytest.MonkeyPatch.context() as change:
        change.setattr(consensus, "read", read)
        place.synchronize()
        _watch(place, "error")
        try:
            yield reads
        finally:
            _watch(place, "default")


def _watch(place: Place, how: str) -> None:
    if not place.dry:
        torch.cuda.set_sync_debug_mode(how)
