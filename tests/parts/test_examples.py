"""The steps of examples/ equal plain PyTorch in one process, and keep to their schedules."""

import pytest

import fshard as fs
from tests.parts.examples import CASES, OPTIMIZERS, parity
from tests.shared.workers import Pools


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_step_on_played_ranks_equals_plain_pytorch(number: int) -> None:
    name, opt = [*CASES][number], [*OPTIMIZERS][number % 2]
    for params, metrics in fs.virtual_mesh((1 + number % 3,), ("data",)).run(lambda: parity(name, opt)):
        assert params < 1e-9 and metrics < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_plain_pytorch(name: str, opt: str) -> None:
    params, metrics = parity(name, opt)
    assert params < 1e-9 and metrics < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("opt", OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_on_several_ranks_equals_plain_pytorch(pool: Pools, name: str, opt: str, world: int) -> None:
    for params, metrics in pool(world).run(parity, name, opt, timeout=120):
        assert params < 1e-9 and metrics < 1e-9
