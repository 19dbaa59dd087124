"""split over the kinds of module there are, and under torch.func. The oracle is functional_call."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fshard import tree
from fshard.errors import PlanError, UnitError
from fshard.model import split
from tests.model.cases import IDS, Net, Normed, Recorder, close, equal, flat


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ParameterList([torch.randn(3) for _ in range(2)])
        self.named = nn.ParameterDict({"left": torch.randn(3), "right": torch.randn(3)})
        self.mods = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 3), nn.GELU())})
        self.plain = [self.mods["a"]]

    def forward(self, x: Tensor, *, flip: bool = False) -> tuple[Tensor, list[Tensor]]:
        for p in self.many:
            x = x + p
        for key in self.named:
            x = x * self.named[key]
        order = sorted(self.mods, reverse=flip)
        outs = [self.mods[key](x) for key in order]
        return self.plain[0](x), outs


@pytest.mark.parametrize("units", [(), "mods.*", (nn.Linear,), ("many",), ("mods.b",)])
def test_containers(units: Any) -> None:
    net = Containers()
    x = torch.randn(2, 3)
    if units == ("many",):
        with pytest.raises(PlanError, match=r"many: ParameterList"):
            split(net, units)
        return
    model = split(net, units)
    for flip in (False, True):
        equal(model.apply(model.params, x, flip=flip), net(x, flip=flip))


def test_a_reference_in_a_plain_list_is_the_unit_too() -> None:
    net = Containers()
    model = split(net, "mods.*")
    engine = Recorder()
    equal(model.apply(engine.mark(model.params), torch.ones(1, 3)), net(torch.ones(1, 3)))
    assert [unit.name for unit, _ in engine.calls] == ["mods.a", "mods.b", "mods.a"]


class Listed(nn.Module):
    """Parameters in attributes: its own, and one of another module."""

    def __init__(self, other: nn.Parameter | None = None) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.own, self.others = {"weights": [self.a.weight]}, (other,)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) + x @ self.own["weights"][0]
        return y if self.others[0] is None else y + x @ self.others[0]


@pytest.mark.parametrize("units", [(), ("*",), ("0",)])
def test_parameters_in_attributes_are_those_of_the_call(units: Any) -> None:
    net, x = nn.Sequential(Listed(), Listed()), torch.ones(2, 3)
    model = split(net, units=units)
    assert torch.equal(model.apply(model.params, x), net(x))
    doubled = tree.map(lambda leaf: 2 * leaf.detach(), model.params)
    with torch.no_grad():
        for leaf in net.parameters():
            leaf.mul_(2)
    assert torch.equal(model.apply(doubled, x), net(x))


def test_a_unit_holds_no_parameters_of_others() -> None:
    first = Listed()
    net = nn.Sequential(first, Listed(first.a.weight))
    model = split(net)
    equal(model.apply(model.params, torch.ones(2, 3)), net(torch.ones(2, 3)))
    with pytest.raises(UnitError, match=r"'others' of a Listed in a unit holds parameters .* such as 0.a.weight"):
        split(net, units=("1",))


def test_a_module_without_parameters_and_without_units() -> None:
    model = split(nn.GELU())
    assert model.params == {} and model.units == ()
    equal(model.apply({}, torch.ones(2)), nn.GELU()(torch.ones(2)))


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules(make: Any) -> None:
    module = nn.Sequential(make(3, 4, num_layers=2, bidirectional=True))
    x = torch.randn(5, 2, 3)
    for units in ((), "0"):
        model = split(module, units)
        equal(model.apply(model.params, x), module(x))
        double = tree.map(lambda leaf: 2 * leaf, model.params)
        equal(model.apply(double, x), functional_call(module, flat(double), (x,)))
        equal(model.apply(model.params, x), module(x))


def test_torchs_own_transformer() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 5, 8)
    for mode in (True, False):
        net.train(mode)
        model = split(net, nn.TransformerEncoderLayer)
        with torch.no_grad():
            close(model.apply(model.params, x), net(x))


def test_parametrizations_and_weight_norm() -> None:
    nets = [
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)),
        nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), nn.Linear(3, 2)),
    ]
    with pytest.warns(FutureWarning):
        nets.append(nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)))
    x = torch.randn(2, 3)
    for net in nets:
        for units in ((), "*"):
            model = split(net, units)
            equal(model.apply(model.params, x), net(x))
            double = tree.map(lambda leaf: 2 * leaf, model.params)
            close(model.apply(double, x), functional_call(net, flat(double), (x,)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward-mode rules
@pytest.mark.parametrize("units", [(), "blocks.*"])
def test_transforms_equal_functional_call(units: Any) -> None:
    net = Net()
    model = split(net, units)

    def ours(params: Any, ids: Tensor) -> Tensor:
        return model.apply(params, ids)["logits"].square().mean()

    def theirs(params: Any, ids: Tensor) -> Tensor:
        return functional_call(net, params, (ids,))["logits"].square().mean()

    plain = {path: leaf.detach() for path, leaf in net.named_parameters()}
    direction = {path: torch.randn_like(leaf) for path, leaf in plain.items()}
    nested = tree.nest(direction)
    close(flat(torch.func.grad(ours)(model.params, IDS)), torch.func.grad(theirs)(plain, IDS))
    close(
        torch.func.jvp(lambda p: ours(p, IDS), (model.params,), (nested,)),
        torch.func.jvp(lambda p: theirs(p, IDS), (plain,), (direction,)),
    )
    close(
        flat(torch.vmap(torch.func.grad(ours), in_dims=(None, 0))(model.params, IDS)),
        torch.vmap(torch.func.grad(theirs), in_dims=(None, 0))(plain, IDS),
    )
    close(
        flat(torch.func.jvp(lambda p: torch.func.grad(ours)(p, IDS), (model.params,), (nested,))[1]),
        torch.func.jvp(lambda p: torch.func.grad(theirs)(p, IDS), (plain,), (direction,))[1],
    )


def test_an_ensemble_by_vmap_over_parameters_and_buffers() -> None:
    nets = [Normed() for _ in range(3)]
    params, buffers = torch.func.stack_module_state(nets)  # type: ignore[arg-type]
    x = torch.randn(5, 4)
    for units in ((), "blocks.*"):
        model = split(nets[0], units)

        def member(p: Any, b: Any, model: Any = model) -> Any:
            return model.apply(p, x, buffers=b)

        stacked = tree.nest({path: leaf.detach() for path, leaf in params.items()})
        out, new = torch.vmap(member)(stacked, tree.nest(buffers))
        for i, net in enumerate(copy.deepcopy(nets)):
            close(out[i], net(x))
            for path, buffer in net.named_buffers():
                close(flat(new)[path][i], buffer)
