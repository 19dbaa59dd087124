"""Random numbers inside a step depend on the state alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fshard.model.philox import fold


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
            generator.manual_seed(fold(seed, f"step {step} part {part}") % 2**63)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
