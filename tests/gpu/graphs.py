"""Unit graphs with attention and dropout: fx in every bit, Inductor up to rounding, and what the first call takes."""

import shutil
from dataclasses import replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fshard as fs
from tests.gpu.models import TINY, Job, Size, alone, job, rows
from tests.gpu.place import Clock, Found, Place

BF16 = fs.Precision(torch.bfloat16, torch.bfloat16)
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def run(place: Place, found: Found) -> None:
    """Train with and without graphs, in float32 and bfloat16, with each kernel of attention."""
    place.deterministic()
    size = replace(place.of(Size(tokens=128), TINY), dropout=0.1, attending=0.1)
    steps = place.of(5, 2)
    for dtype, precision in {"float32": None, "bfloat16": BF16}.items():
        with found.trying(f"fx, {dtype}"):
            made = job(size, alone(place.device), precision=precision)
            want, _ = _train(made, steps, place)
            _fx(found, f"fx, {dtype}", made, steps, place, want)
    if place.dry:
        found.leave("kernels of attention on CUDA, and Inductor's kernels of Triton")
    else:
        with found.trying("kernels of attention"):
            _kernels(place, found, job(size, alone(place.device), precision=BF16), steps)
    if place.short or shutil.which("c++") is None and place.dry:
        found.leave("Inductor")
        return
    if place.dry:
        size = replace(size, attending=0.0)
        found.leave("dropout inside of attention under Inductor, whose code for it gives nan on the CPU")
    for dtype, precision, bound in (("float32", None, 1e-4), ("bfloat16", BF16, 3e-2)):
        if place.dry and precision is not None:
            continue
        with found.trying(f"inductor, {dtype}"):
            made = job(size, alone(place.device), precision=precision)
            want, _ = _train(made, steps, place)
            got, step = _train(made, steps, place, compile="inductor")
            found.near(f"inductor, {dtype}: loss of the last step", got[-1], want[-1], bound)
            _used(found, f"inductor, {dtype}", step)


def _train(made: Job, steps: int, place: Place, **options: Any) -> tuple[list[float], Any]:
    """Losses and norms, and the step."""
    state, step, found = made.start(), made.step(**options), []
    for number in range(steps):
        state, metrics = step(state, rows(made.size, number, made.mesh))
        found += [metrics.grad_norm.item(), metrics.loss.item()]
    place.synchronize()
    return found, step


def _fx(found: Found, name: str, made: Job, steps: int, place: Place, want: list[float]) -> None:
    clock = Clock()
    got, step = _train(made, steps, place, compile="fx")
    found.number(f"{name}: seconds of {steps} steps with their traces", clock.seconds())
    found.check(got == want, f"{name}: {got} where {want} was expected")
    _used(found, name, step)


def _used(found: Found, name: str, step: Any) -> None:
    """Whether the units ran as graphs."""
    text = str(step.units)
    found.number(f"{name}: units", text)
    found.check("as it is" not in text, f"{name}: units run as they are:\n{text}")


def _kernels(place: Place, found: Found, made: Job, steps: int) -> None:
    """Each kernel by itself: a graph that was traced with one is not used with another."""
    step, state = made.step(compile="fx"), made.start()
    for name, kernel in KERNELS.items():
        with sdpa_kernel(kernel):
            try:
                want, _ = _train(made, steps, place)
            except RuntimeError as error:  # the kernel does not serve these sizes, or this GPU
                found.leave(f"attention by {name}: {str(error).splitlines()[0]}")
                continue
            _fx(found, f"fx, attention by {name}", made, steps, place, want)
            state, metrics = step(state, rows(made.size, 0, made.mesh))
            found.check(metrics.loss.item() > 0, f"attention by {name}: {metrics.loss}")
