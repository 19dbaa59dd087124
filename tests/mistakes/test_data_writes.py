"""Writes to the ``.data`` of parameters in a forward would change a gathered copy alone, and are refused."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from tests.shared.workers import Pools


def times(module: nn.Linear) -> None:
    """Scale the weights where they lie."""
    module.weight.data.mul_(0.5)


def clamp(module: nn.Linear) -> None:
    """Clip the bias through a view of its data."""
    module.bias.data[:2].clamp_(-1.0, 1.0)


def copied(module: nn.Linear) -> None:
    """Write other values over the weights."""
    module.weight.data.copy_(torch.zeros_like(module.weight))


def out(module: nn.Linear) -> None:
    """Let an op write its result there."""
    torch.neg(module.bias.detach(), out=module.bias.data)


def other(module: nn.Linear) -> None:
    """Give the parameter other memory."""
    module.weight.data = module.weight.data * 0.5


WRITES: dict[str, tuple[Callable[[nn.Linear], None], str]] = {
    "mul_": (times, "weight"),
    "view": (clamp, "bias"),
    "copy_": (copied, "weight"),
    "out=": (out, "bias"),
    "assigned": (other, "weight"),
}


class Net(nn.Module):
    """Two layers, one of which writes before it computes; ``reads`` makes its program depend on values."""

    def __init__(self, write: Callable[[nn.Linear], None], reads: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.write, self.reads = write, reads

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        if self.reads and x.sum().item() > 1e6:
            x = x * 2
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Writing(nn.Linear):
    """A layer that writes to itself."""

    write: Callable[[nn.Linear], None]

    def forward(self, x: Tensor) -> Tensor:
        """An affine map."""
        self.write(self)
        return super().forward(x)


def made(write: Callable[[nn.Linear], None], units: Any, reads: bool = False) -> tuple[Any, fs.TrainState]:
    """A step of the net, whose second layer writes, and a state."""
    net = Net(write, reads)
    net.layers[1] = layer = Writing(4, 4)
    layer.write = write
    model = fs.split(net, units=units)
    plan = fs.make_plan(model, fs.make_mesh((-1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(lambda params, x: model.apply(params, x), opt, plan)
    return step, fs.init_state(plan, opt)


@pytest.mark.parametrize("units", [["layers.*"], []], ids=["in a unit", "outside of units"])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_the_data_of_a_parameter_is_refused(name: str, units: list[str]) -> None:
    write, path = WRITES[name]
    step, state = made(write, units)
    with pytest.raises(fs.errors.UnitError, match=rf"wrote to the \.data of parameters:\n  layers\.1\.{path}"):
        step(state, torch.ones(2, 4))


@pytest.mark.parametrize("units", [["layers.*"], []], ids=["in a unit", "outside of units"])
@pytest.mark.parametrize("name", WRITES)
def test_so_is_one_in_a_program_that_reads_values(name: str, units: list[str]) -> None:
    write, path = WRITES[name]
    step, state = made(write, units, reads=True)
    with pytest.raises(fs.errors.UnitError, match=rf"wrote to the \.data of parameters:\n  layers\.1\.{path}"):
        step(state, torch.ones(2, 4))


def test_reading_data_and_writing_to_copies_of_it_is_no_write() -> None:
    def reads(module: nn.Linear) -> None:
        module.weight.data.clone().mul_(2.0)
        module.weight.detach().square().add_(1.0)

    for units, values in itertools.product((["layers.*"], []), (False, True)):
        step, state = made(reads, units, values)
        state, _ = step(state, torch.ones(2, 4))
        assert state.step == 1


def on_ranks(units: list[str], reads: bool) -> list[str]:
    """On a rank, where leaves are gathered: what steps say of each write, and of none."""
    said = []
    for write in (*[write for write, _ in WRITES.values()], lambda module: None):
        step, state = made(write, units, reads)
        try:
            for _ in range(2):
                state, _ = step(state, torch.ones(2, 4))
            said.append("")
        except fs.errors.ShardError as error:
            said.append(str(error))
    return said


@pytest.mark.sample(2)
@pytest.mark.parametrize("units", [["layers.*"], []], ids=["in a unit", "outside of units"])
@pytest.mark.parametrize("reads", [False, True], ids=["traced", "on demand"])
def test_gathers_are_no_writes(pool: Pools, units: list[str], reads: bool) -> None:
    for said in pool(2).run(on_ranks, units, reads):
        assert said[-1] == ""
        for (_, path), told in zip(WRITES.values(), said, strict=False):
            assert "wrote to the .data of parameters" in told and f"layers.1.{path}" in told
