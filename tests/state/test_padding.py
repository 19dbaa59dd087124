"""What pads the leaves of a group stays zero, whatever the optimizer keeps there: after a restore too.

Wire formats give a block one scale, and norms add up whole buffers: both read what lies between leaves.
"""

from typing import Any

import pytest
import torch

import fshard as fs
from fshard.state.entries import assemble, entries, scalars
from tests.fuzz.draw import BLOCKS, ELEMENTWISE, WHOLE

OPTIMIZERS = {**ELEMENTWISE, **WHOLE, **BLOCKS}


def start() -> dict[str, Any]:
    """Leaves that no alignment divides."""
    draw = torch.Generator().manual_seed(0)
    made = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    blocks = {"0": {"up": {"weight": made(5, 7)}, "down": {"weight": made(7, 5)}}}
    return {"blocks": blocks, "out": {"weight": made(3, 3), "bias": made(5)}}


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return sum(((leaf * x).sin().square().sum() for leaf in fs.tree.leaves(params)), x.new_zeros(()))


def between_leaves(state: fs.TrainState) -> float:
    """The largest of what lies between the leaves of a state that is not used any more."""
    state = fs.settle(state)
    shards = state.memory.shards(state.step)
    for entry in entries(state):
        entry.tensor.zero_()
    return max(shard.param.abs().max().item() for shard in shards if shard.param.numel())


def trained(name: str, restored: bool) -> tuple[float, float]:
    """On a rank: the largest of the padding and the distance from steps without a restore."""
    mesh = fs.make_mesh((-1,), ("data",))
    opt = OPTIMIZERS[name]()
    align = "leaf" if name in WHOLE else 256 if name in BLOCKS else 16
    rule = fs.Rule(".*", fs.fsdp("data"), align=align)
    plan = fs.make_plan(start(), mesh, [rule], batch=fs.P("data"))
    step = fs.make_train_step(loss_fn, opt, plan, donate=False)
    state = other = fs.init_state(plan, opt, params=start())
    for number in range(4):
        if number == 2 and restored:
            kept = {entry.name: entry.tensor.clone() for entry in entries(fs.settle(state))}
            state = assemble(plan, opt, lambda entry, kept=kept: entry.tensor.copy_(kept[entry.name]), scalars(state))
        state, _ = step(state, torch.tensor([1.0 + number], dtype=torch.float64))
        other, _ = step(other, torch.tensor([1.0 + number], dtype=torch.float64))
    pairs = zip(entries(fs.settle(state)), entries(fs.settle(other)), strict=True)
    distance = max(torch.dist(mine.tensor.double(), its.tensor.double()).item() for mine, its in pairs)
    return between_leaves(state), distance


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_padding_stays_zero(name: str) -> None:
    for found in fs.virtual_mesh((2,), ("data",)).run(trained, name, True):
        assert found == (0.0, 0.0)
