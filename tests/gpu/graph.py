"""Steps that are captured by ``Policy(graph="step")``: the bits of eager steps, reasons, and what a replay takes."""

import statistics
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import fshard as fs
from tests.gpu.models import TINY, Job, Size, alone, job, rows
from tests.gpu.place import Clock, Found, Place
from tests.shared.capture_device import capturing

HOST = Size(depth=12, width=64, heads=2, tokens=16, batch=1, vocabulary=64)
LARGE = Size(depth=12, width=1024, heads=16, tokens=512, batch=8, vocabulary=8192)
GRAPH = fs.Policy(graph="step")


def run(place: Place, found: Found) -> None:
    """Train with graphs and without: dropout, clipping, a rate that changes, and a loss that reads its device."""
    place.deterministic()
    if place.dry:
        found.leave("CUDA graphs: captures were played on the CPU")
    sizes = place.of({"host": replace(HOST, dropout=0.1), "large": LARGE}, {"host": replace(TINY, dropout=0.1)})
    for name, size in sizes.items():
        for form in (None, "fx"):
            with found.trying(f"{name}, {form or 'eager'}"):
                _compare(place, found, f"{name}, {form or 'eager'}", size, form)
    with found.trying("a loss that reads its device"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, how, _ = _trained(place, TINY, 6, GRAPH, None, reads=True)
        found.check(how[-1].startswith("eager:"), f"a loss that reads its device ran {how[-1]}")
        found.number("a loss that reads its device", how[-1])


def _compare(place: Place, found: Found, name: str, size: Size, form: str | None) -> None:
    steps = place.of(30, 8)
    want, _, plain = _trained(place, size, steps, fs.Policy(), form)
    got, how, times = _trained(place, size, steps, GRAPH, form)
    found.check(how[3:] == ["replayed"] * (steps - 3), f"{name}: steps ran {dict.fromkeys(how)}")
    found.check(got == want, f"{name}: losses and norms are not those of eager steps: {got[-2:]} and {want[-2:]}")
    numbers = {"by itself": statistics.median(plain[3:]), "replayed": statistics.median(times[3:])}
    found.number(f"{name}: ms of a step", numbers | {"ratio": numbers["replayed"] / numbers["by itself"]})


def _trained(
    place: Place, size: Size, steps: int, policy: fs.Policy, form: str | None, reads: bool = False
) -> tuple[list[float], list[str], list[float]]:
    """Losses and norms; how each step ran; and milliseconds of each."""
    found: list[float] = []
    how, times = [], []
    with capturing() if place.dry else nullcontext() as on:
        mesh = alone(place.device)
        made = job(size, mesh if on is None else on(mesh)[0], fs.optim.adamw(lambda step: 2.0 ** -(8 + step % 3)))
        state, step = made.start(), _step(made, reads, schedule=policy, compile=form, clip_norm=0.5)
        for number in range(steps):
            place.synchronize()
            clock = Clock()
            state, metrics = step(state, rows(size, number, made.mesh))
            place.synchronize()
            times.append(1e3 * clock.seconds())
            found += [metrics.loss.item(), metrics.grad_norm.item()]
            how.append(metrics.ran.graph)
    return found, how, times


def _step(made: Job, reads: bool, **options: Any) -> Any:
    if not reads:
        return made.step(**options)

    def reading(params: Any, batch: Any) -> Any:
        loss = made.loss(params, batch)
        return loss * (1.0 if loss.detach().item() > 0 else 2.0)

    return fs.make_train_step(reading, made.opt, made.plan, **options)
