"""Random numbers inside a step depend on the state alone."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fshard.model.philox import fold

RUN = 64
"""Steps whose seeds are made together. A hash takes 1 us, or 35 where its code is cold, as it is once a step."""


@contextmanager
def seeded(seed: int, step: int, part: int, device: torch.device) -> Iterator[None]:
    """Run with torch's generators seeded by (seed, step, part of the global batch); leave them as they were.

    So a step can run again, after a failure or in a resumed job, and draw the same numbers.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(_seeds(seed, step // RUN, part)[step % RUN])
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def reseed(seed: int, name: str, device: torch.device) -> None:
    """Seed torch's generators anew, inside of ``seeded``, for a part of the step that draws numbers of its own.

    Args:
        seed: of the step.
        name: of the part.
        device: of the rank.
    """
    part = fold(seed, name) % 2**63
    torch.default_generator.manual_seed(part)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(part)


@functools.lru_cache(maxsize=16)
def _seeds(seed: int, run: int, part: int) -> Sequence[int]:
    """The seeds of a run of steps."""
    return [fold(seed, f"step {step} part {part}") % 2**63 for step in range(run * RUN, (run + 1) * RUN)]
