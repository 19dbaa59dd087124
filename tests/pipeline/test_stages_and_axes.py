"""Pipelines whose units communicate over another axis, by its name."""

from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import parallel
from tests.shared import parity

RULES = parallel.megatron_rules(column=[r".*\.up", "embed"], row=r".*\.down", flat="data")[:-1]


def loss_fn(params: Any, tokens: Tensor) -> Tensor:
    """An embedding outside of units, which only the first stage holds, and units of two cut matrices."""
    x = parallel.vocab_embedding(tokens, params["embed"])
    for name in "ab":
        x = block(params[name], x)
    return x.square().mean()


@fs.unit
def block(p: Any, x: Tensor) -> Tensor:
    """A perceptron."""
    return x + parallel.row_linear(torch.tanh(parallel.column_linear(x, p["up"])), p["down"])


def trained(sizes: tuple[int, ...], names: tuple[str, ...], stages: fs.Stages | None = None) -> list[parity.Run]:
    """What ranks see of three steps."""
    draw = torch.Generator().manual_seed(0)
    params: dict[str, Any] = {"embed": torch.randn(8, 4, generator=draw)}
    for name in "ab":
        params[name] = {"up": torch.randn(6, 4, generator=draw), "down": torch.randn(4, 6, generator=draw)}
    mesh, opt = fs.virtual_mesh(sizes, names), fs.optim.adamw(1e-2)
    batches = [torch.randint(8, (4, 3), generator=torch.Generator().manual_seed(n)) for n in range(3)]

    def on_a_rank() -> parity.Run:
        plan = fs.make_plan(params, mesh, RULES, batch=fs.P("data"), units=("a", "b"), stages=stages)
        step = fs.make_train_step(loss_fn, opt, plan, accumulate=2)
        return parity.sharded(step, fs.init_state(plan, opt, params=params), plan, map(plan.local_batch, batches))[0]

    return mesh.run(on_a_rank)


def test_cut_layers_in_stages() -> None:
    """Stages, shards and cut matrices at once."""
    want = trained((1, 1), ("data", "tp"))[0]
    assert parity.differences(trained((2, 2, 2), ("stage", "data", "tp"), fs.Stages("stage")), want) == []
