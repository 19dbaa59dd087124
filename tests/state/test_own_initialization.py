"""Fresh values where the module has code of its own for them: a warning that names it, or rules in its place."""

import warnings

import pytest
from torch import nn

import fshard as fs
from fshard import tree


class Net(nn.Module):
    """A small language model that starts as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.up = nn.Embedding(50, 8), nn.Linear(8, 8)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


def planned(module: nn.Module) -> fs.Plan:
    return fs.make_plan(fs.split(module), fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])


def test_pytorchs_defaults_in_the_place_of_own_ones_are_told() -> None:
    with fs.empty_weights():
        plan = planned(Net())
    with pytest.warns(UserWarning, match=r"wte.weight and 2 more .*default.*Net._init_weights.*init=\["):
        fs.init_state(plan)
    rules = [(r".*weight", fs.init.normal(0.02)), (r".*bias", fs.init.zeros())]
    state = fs.init_state(plan, init=rules)  # warnings are errors
    assert abs(state.params["wte"]["weight"].std().item() - 0.02) < 2e-3
    with pytest.warns(UserWarning, match=r"up.bias begin"):
        fs.init_state(plan, init=rules[:1])
    net = Net()
    fs.init_state(planned(net), params=fs.split(net).params)


def test_modules_of_torch_have_their_own_defaults() -> None:
    for module in (nn.Sequential(nn.Linear(2, 2)), nn.LSTM(2, 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tree.leaves(fs.init_state(planned(module)).params)


def test_pickled_plans_have_no_code() -> None:
    plan = fs.make_plan(fs.split(Net()), fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))])
    assert plan.code.module is not None and plan.only(".*").code is plan.code
    assert isinstance(plan.code.__reduce__()[0](), type(plan.code))
