"""Hooks on saved tensors see activations and no parameters, so a copy that comes late copies no other group."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import fshard as fs
from fshard import tree
from tests.runtime.test_lanes import ROWS, SHARD, WIDTH, loss, made, params


class LateCopies:
    """Moves what is saved elsewhere, as offloading on a stream of its own does: a copy comes two tensors later."""

    def __init__(self) -> None:
        self.waiting: list[list[Tensor]] = []
        self.seen = 0

    def pack(self, x: Tensor) -> list[Tensor]:
        """Keep the tensor, and copy those that have waited for long enough."""
        self.seen += 1
        self.waiting.append([x])
        while len(self.waiting) > 2:
            self._copy(self.waiting.pop(0))
        return self.waiting[-1]

    def unpack(self, kept: list[Tensor]) -> Tensor:
        """The copy, once all are made."""
        while self.waiting:
            self._copy(self.waiting.pop(0))
        return kept[0]

    @staticmethod
    def _copy(kept: list[Tensor]) -> None:
        kept[0] = kept[0].detach().clone()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Inside, autograd saves by it."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield


def trained(where: str) -> tuple[Any, int]:
    """Losses and parameters of three steps, with hooks around the step, or in the loss."""

    def rank() -> tuple[Any, int]:
        copies = LateCopies()

        def fn(p: Any, batch: Tensor) -> Tensor:
            if where != "loss":
                return loss(p, batch)
            with copies.hooks():
                return loss(p, batch)

        mesh = fs.make_mesh(*SHARD)
        plan, opt = made(mesh, [(".*", fs.fsdp("shard"))]), fs.optim.adamw(1e-2)
        state, numbers = fs.init_state(plan, opt, params=params()), []
        step = fs.make_train_step(fn, opt, plan, schedule=fs.Policy(0, 1), debug=True)  # what is freed becomes nan
        for number in range(3):
            batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).chunk(2)[mesh.rank]
            if where == "step":
                with copies.hooks():
                    state, metrics = step(state, batch)
            else:
                state, metrics = step(state, batch)
            numbers.append(metrics.loss.item())
        leaves = tree.leaves(fs.unshard(fs.settle(state).params, plan))
        return (numbers, [x.tolist() for x in leaves]), copies.seen

    return fs.virtual_mesh(*SHARD).run(rank)[0]


@pytest.mark.parametrize("where", ["step", "loss"])
def test_a_copy_that_comes_late_is_that_of_an_activation(where: str) -> None:
    want, _ = trained("nowhere")
    got, seen = trained(where)
    assert got == want
    assert seen
