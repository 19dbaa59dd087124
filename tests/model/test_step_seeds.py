"""The seeds of steps: made for runs of steps at once, each that of its own step alone."""

import pytest
import torch

from fshard.model.philox import fold
from fshard.runtime.engine.rng import RUN, seeded

CPU = torch.device("cpu")


@pytest.mark.parametrize("step", [0, 1, RUN - 1, RUN, RUN + 1, 10 * RUN - 1, 12345])
@pytest.mark.parametrize("part", [0, 3])
def test_a_step_draws_from_the_seed_of_its_number(step: int, part: int) -> None:
    with seeded(7, step, part, CPU):
        drawn = torch.rand(4)
    wanted = torch.Generator().manual_seed(fold(7, f"step {step} part {part}") % 2**63)
    assert torch.equal(drawn, torch.rand(4, generator=wanted))


def test_the_generator_is_left_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), seeded(7, 3, 0, CPU):
        torch.rand(4)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
