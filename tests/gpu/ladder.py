"""``benchmarks/gpu_ladder.py`` for one peer, in the process of a stage."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fshard as fs
from tests.gpu.place import Found, Place
from tests.shared.capture_device import capturing

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")


def run(place: Place, found: Found, told: str = "fshard") -> None:
    """Measure a peer: its name, and perhaps ", again" or ", 16 rows"."""
    with pytest.MonkeyPatch.context() as change:
        change.syspath_prepend(FOLDER)
        _measure(place, found, told)


def _measure(place: Place, found: Found, told: str) -> None:
    import gpu_ladder
    import gpu_peers

    peer, _, more = told.partition(", ")
    rows = re.match(r"\d+", more)
    plays = place.dry and peer.endswith("graph")
    if place.dry:
        found.leave("figures: a tiny model on the CPU" + (", whose captures were played" if plays else ""))
    if why := None if plays else gpu_peers.obstacle(peer):
        found.leave(why)
        return
    with found.trying(told), played(plays):
        numbers = gpu_ladder.measure(peer, int(rows[0]) if rows else None, "bf16")
        found.number(told, numbers)
        found.check(numbers["loss"] == numbers["loss"], f"{told}: the loss is {numbers['loss']}")
        how = numbers.get("ran", "replayed")
        found.check(how == "replayed", f"{told}: the step ran {how}")


@contextmanager
def played(plays: bool = True) -> Iterator[None]:
    """Inside, meshes that are made have a device that plays captures on the CPU."""
    if not plays:
        yield
        return
    with capturing() as on, pytest.MonkeyPatch.context() as change:
        real = fs.make_mesh
        change.setattr(fs, "make_mesh", lambda *args, **more: on(real(*args, **more))[0])
        yield
