"""Units that hold modules outside of them in lists and other attributes, which is no way to give them parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs


class Block(nn.Module):
    """A layer that calls what it finds in a container."""

    def __init__(self, others: Any) -> None:
        super().__init__()
        self.lin, self.others = nn.Linear(4, 4), others

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        others = list(self.others.values()) if isinstance(self.others, dict) else self.others
        out: Tensor = others[0](self.lin(x))
        return out


class Net(nn.Module):
    """Two blocks that share a layer of the net."""

    def __init__(self, box: Any) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(box(self.shared)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


BOXES: dict[str, Any] = {"list": lambda m: [m], "tuple": lambda m: (m,), "dict": lambda m: {"a": m}}


def made(box: Any, units: Any) -> tuple[Net, fs.Model, Any, fs.TrainState]:
    """The net, split, with a step and a state."""
    net = Net(box)
    model = fs.split(net, units=units)
    plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda p, x: model.apply(p, x), opt, plan)
    return net, model, step, fs.init_state(plan, opt, params=model.params)


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("stepped", [True, False], ids=["in a step", "by apply"])
def test_a_module_outside_of_the_unit_is_named(box: str, stepped: bool) -> None:
    _, model, step, state = made(BOXES[box], ["blocks.*"])
    says = r"unit blocks\.0 reaches modules outside of it.*\n  shared, by 'others' of a Block\n.*register them"
    with pytest.raises(fs.errors.UnitError, match=says):
        step(state, torch.ones(2, 4)) if stepped else model.apply(model.params, torch.ones(2, 4))


@pytest.mark.parametrize("box", BOXES)
def test_it_is_called_where_no_unit_is_in_between(box: str) -> None:
    net, _, step, state = made(BOXES[box], [])
    x = torch.randn(2, 4)
    loss = step(state, x)[1].loss
    torch.testing.assert_close(loss, net(x))


def test_a_module_list_ties_it() -> None:
    net, model, step, state = made(lambda m: nn.ModuleList([m]), ["blocks.*"])
    x = torch.randn(2, 4)
    torch.testing.assert_close(step(state, x)[1].loss, net(x))
    assert len(model.params) == 2
