"""What all tests share: one thread for torch, and the pools of gloo processes."""

import os
from collections.abc import Iterator

# Ranks inherit it: several threads a rank would fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.workers import Pools  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Keep the test process itself on one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pools]:
    """``pool(world).run(function, *args, timeout=60)``: what each of ``world`` gloo ranks returned."""
    pools = Pools()
    try:
        yield pools
    finally:
        pools.close()
