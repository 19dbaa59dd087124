"""Calm: whether the machine ran at its full speed while something was timed.

The processors of a shared machine are taken away for milliseconds at a time, for a minute on end, whenever their
neighbours compute. That is seen in fixed work: each rank times some before and after what it measures, and turns in
which any of them was slower than usual do not count. What counts is decided by this work alone, never by what was
measured. It also tells how fast the machine was, where times of one minute are compared with those of another.
"""

import os
import time

import torch
import torch.distributed as dist

LIMIT = 1.15
"""Fixed work that takes longer than this, compared with the fastest, was disturbed."""

PATIENCE = 60
"""Half seconds to wait for calm, over all."""

ROUNDS = 20
"""Times that the fixed work is done at first, to know the fastest."""


class Calm:
    """The fixed work of this rank, and its fastest time. Collective: all ranks make it, and ask it, alike.

    Args:
        best: the fastest time that other processes had on this machine, in seconds; 0 if there were none. A process
            that runs in a slow minute from its begin to its end would otherwise take that for calm.

    Attributes:
        seconds: how long the work took at the last call, on average over ranks.
    """

    def __init__(self, best: float = 0.0) -> None:
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.waves = -(-self.ranks // len(os.sched_getaffinity(0)))
        self.tensors = torch.ones(256, 160), torch.ones(160, 160), torch.ones(2**20)
        self.best, self.patience, self.seconds = best or float("inf"), PATIENCE, 0.0
        for _ in range(ROUNDS):
            self()

    def __call__(self) -> bool:
        """Whether the fixed work was as fast as ever on all ranks. Ranks that share a processor take turns."""
        mine = 0.0
        for wave in range(self.waves):
            dist.barrier()
            if self.rank % self.waves == wave:
                begun = time.perf_counter()
                work(*self.tensors)
                mine = time.perf_counter() - begun
        self.best = min(self.best, mine)
        every = torch.zeros(2, self.ranks, dtype=torch.float64)
        every[:, self.rank] = torch.tensor([mine, mine / self.best])
        dist.all_reduce(every)
        self.seconds = every[0].mean().item()
        return every[1].max().item() <= LIMIT

    def wait(self) -> None:
        """Wait for a calm moment, as long as there is patience."""
        while self.patience and not (self() and self()):
            self.patience -= 1
            time.sleep(0.5)


def work(x: torch.Tensor, y: torch.Tensor, long: torch.Tensor) -> None:
    """Some ten milliseconds of one processor: products that fit into its caches, memory, and many small operators."""
    for _ in range(25):
        x @ y
    for _ in range(10):
        long.add(1.0)
    small = y[0]
    for _ in range(1000):
        small = small.add(1.0)
