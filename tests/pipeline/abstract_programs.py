"""Programs with stages on meshes without processes, for tests of what is known of them before they run."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs

WIDTH, WORDS = 8, 16


class Net(nn.Module):
    """An embedding, blocks and a head, which is tied to the embedding if that is wanted."""

    def __init__(self, blocks: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Run it."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def plan_on(
    mesh: fs.Mesh, order: str = "", chunks: int = 1, tied: bool = False, blocks: int = 0
) -> tuple[Any, fs.Plan]:
    """A model and its plan: one block a stage by default."""
    torch.manual_seed(0)
    model = fs.split(Net(blocks or mesh.axis_size("stage") * chunks, tied), units=["blocks.*"])
    stages = fs.Stages("stage", chunks=chunks, placement="v" if order in ("zbv", "dualpipev") else "loop")
    return model, fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"), stages=stages)


def step_on(mesh: fs.Mesh, order: str, chunks: int, microbatches: int, tied: bool = False) -> Any:
    """A train step."""
    model, plan = plan_on(mesh, order, chunks, tied)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        ids, wanted = batch
        return F.cross_entropy(model.apply(params, ids).flatten(0, 1), wanted.flatten())

    policy = fs.Policy(pipeline=order)
    return fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, schedule=policy, accumulate=microbatches)


def batch(microbatches: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and the wanted ones, of some rows a microbatch."""
    ids = torch.zeros(microbatches * rows, 4, dtype=torch.int64)
    return ids, ids


def traced(
    order: str, ranks: int, microbatches: int, chunks: int = 1, data: int = 1, rank: int = 0, **more: Any
) -> Any:
    """What a trace finds on an abstract mesh."""
    mesh = fs.abstract_mesh((ranks, data), ("stage", "data"), rank=rank)
    return step_on(mesh, order, chunks, microbatches, **more).trace(batch(microbatches))
