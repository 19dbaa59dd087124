"""PyTorch's own tensor parallelism inside of units: ``parallelize_module`` on DTensors made of the leaves.

The module that PyTorch has parallelised is the code. Its parameters are fshard's: cut by ``tp`` in the plan,
flat-sharded besides, and made DTensors inside of the unit.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.func import functional_call

import fshard as fs
from fshard import P, parallel, tree
from tests.shared import parity
from tests.shared.parity import Run
from tests.shared.workers import Pools

STEPS = 6


class Block(nn.Module):
    """A norm and an MLP with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def modules() -> list[Block]:
    """The same start values in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return [Block(), Block()]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch."""
    x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, 1).sin()


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Squares."""
    return (y - target).square().mean()


def train(sequence: bool) -> Run:
    """On a rank: losses, and whole parameters after the last step."""
    blocks = modules()
    with fs.make_mesh((2, -1), ("tp", "shard")) as mesh:
        tp = DeviceMesh("cpu", torch.arange(mesh.size).view(mesh.sizes), mesh_dim_names=mesh.axis_names)["tp"]
        layers: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            layers |= {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1))}
            layers |= {"down": RowwiseParallel(output_layouts=Shard(1), use_local_output=True)}
        code = parallelize_module(copy.deepcopy(blocks[0]), tp, layers)
        cuts = {path: leaf.placements if isinstance(leaf, DTensor) else None for path, leaf in code.named_parameters()}

        def forward(p: Any, x: Tensor) -> Tensor:
            given = {
                path: leaf if cuts[path] is None else DTensor.from_local(leaf, tp, cuts[path], run_check=False)
                for path, leaf in tree.paths(p)
            }
            y = functional_call(code, given, (x,))
            return y.to_local() if isinstance(y, DTensor) else y

        unit = fs.unit(forward)

        def loss_fn(params: Any, batch: Any) -> Tensor:
            x, target = batch
            if sequence:
                x = DTensor.from_local(x, tp, [Replicate()], run_check=False).redistribute(tp, [Shard(1)]).to_local()
            for name in ("0", "1"):
                x = x + unit(params[name], x)
            if sequence:
                x = DTensor.from_local(x, tp, [Shard(1)], run_check=False).full_tensor()
            return loss_of(x, target)

        whole = {str(i): tree.nest({k: v.detach() for k, v in b.named_parameters()}) for i, b in enumerate(blocks)}
        rules = parallel.megatron_rules(column=r".*up\..*", row=r".*down\..*", flat="shard")
        plan = fs.make_plan(whole, mesh, rules, batch=P("shard"), units=("*",))
        opt = fs.optim.sgd(0.1, momentum=0.9)
        state = fs.init_state(plan, opt, params=whole)
        step = fs.make_train_step(loss_fn, opt, plan, debug=True)
        parts, at = mesh.shape["shard"], mesh.index(("shard",))
        batches = (tuple(x.chunk(parts)[at] for x in batch(number)) for number in range(STEPS))
        return parity.sharded(step, state, plan, batches, scheduled_from=1)[0]


def plain() -> Run:
    """One process, without any of it."""
    net = nn.ModuleList(modules())

    def backward(number: int) -> float:
        x, target = batch(number)
        for block in net:
            x = x + block(x)
        return parity.backward(loss_of(x, target))

    rule = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return parity.plain(dict(net.named_parameters()), rule, backward, STEPS)


@pytest.mark.parametrize(("world", "sequence"), [(2, False), (4, True)])
def test_parallelised_modules_equal_one_process(pool: Pools, world: int, sequence: bool) -> None:
    problems = parity.differences(pool(world).run(train, sequence), plain())
    assert not problems, "\n".join(problems)
