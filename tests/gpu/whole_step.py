"""A CUDA graph of a whole step: what a step works on never moves, so a step can be captured once and replayed.

What is captured is a step that updates in the backward by an update rule without a count of steps. Its consensus reads
the device, which no graph can: it is left out, and the numbers that it would read are read after the replay.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.runtime.steps import readings
from tests.gpu.models import TINY, Job, Size, alone, job, rows
from tests.gpu.place import Clock, Found, Place

HOST = Size(depth=12, width=64, heads=2, tokens=16, batch=1, vocabulary=64)
LARGE = Size(depth=12, width=1024, heads=16, tokens=512, batch=8, vocabulary=8192)
WARM, REPLAYS = 3, 20


def run(place: Place, found: Found) -> None:
    """Capture a small step and a large one, compare losses and times."""
    if place.dry:
        found.leave("graphs: the step was made, with its read of the device put off to its end")
    sizes = place.of({"host": HOST, "large": LARGE}, {"host": TINY})
    for name, size in sizes.items():
        for form in (None, "fx"):
            with found.trying(f"{name}, {form or 'eager'}"):
                made = job(size, alone(place.device), fs.optim.sgd(1e-2))
                _compare(place, found, f"{name}, {form or 'eager'}", made, form)


def _compare(place: Place, found: Found, name: str, made: Job, form: str | None) -> None:
    options: dict[str, Any] = {"schedule": fs.Policy(update="in_backward"), "compile": form}
    batch = rows(made.size, 0, made.mesh)
    want, plain = _eager(place, made, options, batch)
    state, step = made.start(), made.step(**options)
    for _ in range(WARM):
        state, _ = step(state, batch)
    place.synchronize()
    graph = None if place.dry else torch.cuda.CUDAGraph()
    with unread(step) as kept, _captured(graph):
        state, _ = step(state, batch)
    if graph is None:
        found.near(f"{name}: loss", kept[-1][-1].item(), want[WARM], 1e-5)
        return
    times = []
    for _ in range(REPLAYS):
        clock = Clock()
        graph.replay()
        torch.cuda.synchronize()
        times.append(1e3 * clock.seconds())
    found.near(f"{name}: loss after {REPLAYS} replays", kept[-1][-1].item(), want[WARM + REPLAYS - 1], 1e-3)
    graphed = statistics.median(times)
    found.number(f"{name}: ms of a step", {"by itself": plain, "replayed": graphed, "ratio": graphed / plain})


def _eager(place: Place, made: Job, options: dict[str, Any], batch: Tensor) -> tuple[list[float], float]:
    """Losses of as many steps, and the median of their times in milliseconds."""
    state, step, losses, times = made.start(), made.step(**options), [], []
    for _ in range(WARM + place.of(REPLAYS, 1)):
        place.synchronize()
        clock = Clock()
        state, metrics = step(state, batch)
        place.synchronize()
        times.append(1e3 * clock.seconds())
        losses.append(metrics.loss.item())
    return losses, statistics.median(times[WARM:])


def _captured(graph: Any) -> Any:
    return nullcontext() if graph is None else torch.cuda.graph(graph, capture_error_mode="thread_local")


@contextmanager
def unread(step: Any) -> Iterator[list[list[Tensor]]]:
    """Inside, a step reads no number of its device: each is taken for 1, and kept as a tensor. Nothing is seeded."""
    kept: list[list[Tensor]] = []

    def read(values: Sequence[Tensor | float]) -> Iterator[float]:
        kept.append([value.detach() for value in values if isinstance(value, Tensor)])
        return iter([1.0] * len(values))

    with pytest.MonkeyPatch.context() as change:
        change.setattr(readings, "read", read)
        change.setitem(vars(step), "_randomness", lambda *args: nullcontext())
        yield kept
