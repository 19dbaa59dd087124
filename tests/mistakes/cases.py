"""A small model, and what tests of mistakes do with it."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P


class Net(nn.Module):
    """Two blocks and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(4, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """All of it."""
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        y: Tensor = self.norm(x)
        return y


RULES = [(r".*", fs.fsdp("shard"))]
MESH = fs.make_mesh((-1,), ("shard",))
VIRTUAL = fs.virtual_mesh((2,), ("shard",))
NET = Net()
MODEL = fs.split(NET, units=("blocks.*",))
PLAN = fs.make_plan(MODEL, MESH, RULES)
OPT = fs.optim.adamw(0.1)
BATCH = {"x": torch.ones(2, 4)}


def loss(p: Any, b: Any) -> Tensor:
    """A mean loss."""
    return MODEL.apply(p, b["x"]).square().mean()  # type: ignore[no-any-return]


def st() -> fs.TrainState:
    """A state."""
    return fs.init_state(PLAN, OPT)


def step(loss_fn: Any = loss, **options: Any) -> fs.types.TrainStep:
    """A step."""
    return fs.make_train_step(loss_fn, OPT, PLAN, **options)


def v2(fn: Callable[[fs.Mesh, fs.Plan, fs.TrainState], Any]) -> list[Any]:
    """What a function gives on each of two ranks."""

    def go() -> Any:
        mesh = fs.make_mesh((-1,), ("shard",))
        plan = fs.make_plan(MODEL, mesh, RULES, batch=P("shard"))
        return fn(mesh, plan, fs.init_state(plan, OPT))

    return VIRTUAL.run(go)


def ck() -> fs.Checkpointer:
    """A checkpointer of a new folder."""
    return fs.Checkpointer(tempfile.mkdtemp())


def saved() -> fs.Checkpointer:
    """One that holds a state."""
    made = ck()
    made.save(st())
    return made
