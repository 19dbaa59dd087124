"""Ranks for tests of numbers: processes where there are two, and the ranks of a virtual mesh where there are more.

A virtual mesh trains at half the cost, since its ranks share an interpreter with warm caches. That it gives the numbers
of processes is a test of its own, ``tests/played/test_virtual.py``.
"""

from collections.abc import Callable
from typing import Any

import fshard as fs
from tests.shared.workers import Pool

Job = Callable[[int], "Pool | Virtual"]


class Virtual:
    """The ranks of a virtual mesh, called as a pool is.

    Args:
        world: how many.
    """

    def __init__(self, world: int) -> None:
        self.world = world

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call a function on every rank: what each returned. The limit of time is that of the test."""
        return fs.virtual_mesh((self.world,), ("any",)).run(function, *args)
