"""Modules inside of a unit, reached from outside: what code there writes to them is seen, at whichever call."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard.model.writes import Flag, tables

WIDTH = 4


def _x(seed: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.tanh(x)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), _Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.linear(x))


@pytest.mark.parametrize("read", ["x[1]", "x.get(1)", "x.items()", "x.values()", "x | {}", "{} | x", "x.copy()"])
def test_tables_of_children_tell_every_way_of_reading(read: str) -> None:
    _check_tells(read)


@pytest.mark.parametrize("read", ["dict(x)", "{**x}", "[*x]", "repr(x)", "x == {1: 2}", "x != {}", "copy.copy(x)"])
def test_tables_of_children_tell_operators_and_copies(read: str) -> None:
    _check_tells(read)


def _check_tells(read: str) -> None:
    flag = Flag()
    made = tables(flag)[-1]({1: 2})
    assert len(made) == 1 and 1 in made and not flag.opened
    eval(read, {"x": made, "copy": copy})
    assert flag.opened


STASH: list[_Inner] = []

REACH: dict[str, Any] = {
    "attribute": lambda block: block.inner,
    "children": lambda block: [*block.children()][1],
    "table": lambda block: (block._modules | {})["inner"],
    "earlier call": lambda block: (STASH or STASH.append(block.inner) or STASH)[0],
}


class _Late(nn.Module):
    """Code outside of a unit that reaches a module inside of it at levels other than 0, and writes to it above."""

    def __init__(self, reach: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([_Block()])
        self.reach = reach

    def forward(self, x: Tensor, level: float) -> Tensor:
        inner = REACH[self.reach](self.blocks[0]) if level else None
        if inner is not None and level > 0:
            inner.scale = level
        loss: Tensor = self.blocks[0](x).square().mean()
        return loss


@pytest.mark.parametrize("compiled", [None, "fx"])
@pytest.mark.parametrize("reach", REACH)
def test_a_unit_sees_writes_to_a_module_that_code_outside_reaches_late(reach: str, compiled: Any) -> None:
    STASH.clear()
    root = _Late(reach).double()
    model = fs.split(root, "blocks.*")
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.sgd(0.0)
    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(lambda params, batch: model.apply(params, *batch), opt, plan, compile=compiled)
    for i, level in enumerate((0.0, 0.0, 0.0, -1.0, 0.5, 0.0)):
        state, metrics = step(state, (_x(i), level))
        called = copy.deepcopy(root)
        called.blocks[0].inner.scale = max(level, 0.0) or 1.0
        assert metrics.loss.item() == pytest.approx(called(_x(i), 0.0).item(), abs=1e-12), f"call {i} at level {level}"
