"""``units="auto"``: the blocks of a model, found by themselves."""

from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError


def _mlp(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def _model(**parts: nn.Module) -> nn.Module:
    whole = nn.Module()
    for name, part in parts.items():
        whole.add_module(name, part)
    return whole


def _experts() -> nn.Module:
    return _model(router=nn.Linear(4, 2), experts=nn.ModuleList([_called(_mlp()), _called(_mlp())]))


def _called(module: nn.Module) -> nn.Module:
    """The same, with a forward: units must be callable."""
    module.forward = lambda x: x  # type: ignore[method-assign]
    return module


SHARED = _called(_model(a=nn.Linear(4, 4)))
FOUND: dict[str, tuple[nn.Module, tuple[str, ...]]] = {
    "a list": (_model(embed=nn.Linear(2, 4), layers=nn.ModuleList([_mlp(), _mlp()])), ("layers.0", "layers.1")),
    "a list of one": (_model(layers=nn.ModuleList([nn.Linear(2, 2)])), ("layers.0",)),
    "two lists": (
        _model(encoder=_model(block=nn.ModuleList([_mlp()])), decoder=_model(block=nn.ModuleList([_mlp()]))),
        ("encoder.block.0", "decoder.block.0"),
    ),
    "blocks with experts": (_model(layers=nn.ModuleList([_called(_experts()), _called(_experts())])),
                            ("layers.0", "layers.1")),
    "without parameters": (_model(layers=nn.ModuleList([nn.Linear(2, 2), nn.GELU()])), ("layers.0",)),
    "a list of lists": (_model(up=nn.ModuleList([nn.ModuleList([_mlp(), _mlp()]), nn.ModuleList([_mlp()])])),
                        ("up.0.0", "up.0.1", "up.1.0")),
    "a sequence of blocks": (nn.Sequential(nn.Linear(4, 4), _mlp(), _mlp(), nn.Linear(4, 4)), ("1", "2")),
    "stages": (_model(layer1=nn.Sequential(_mlp(), _mlp()), layer2=nn.Sequential(_mlp(), _mlp()), fc=nn.Linear(4, 2)),
               ("layer1.0", "layer1.1", "layer2.0", "layer2.1")),
    "one block under two names": (_model(layers=nn.ModuleList([SHARED, SHARED, nn.Linear(4, 4)])),
                                  ("layers.0", "layers.2")),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_blocks_are_found(name: str) -> None:
    module, units = FOUND[name]
    assert fs.split(module, units="auto").units == units


@pytest.mark.parametrize("module", [nn.Linear(2, 2), _mlp(), _model(a=_mlp(), b=nn.Linear(2, 2)), nn.LSTM(2, 2)])
def test_nothing_to_find_is_an_error(module: nn.Module) -> None:
    with pytest.raises(
        PlanError, match=r"'auto' finds no unit: it takes children of nn\.ModuleLists(?s:.*)Name the units"
    ):
        fs.split(module, units="auto")


def test_a_submodule_may_be_called_auto() -> None:
    assert fs.split(_model(auto=nn.Linear(2, 2)), units=("auto",)).units == ("auto",)


BAD: list[tuple[Any, Any, str]] = [
    (nn.Linear, (), r"takes an nn.Module, and got the class Linear: make one, Linear\(...\)"),
    ({"w": torch.ones(2)}, (), r"got a dict; pass a tree of tensors directly to fs.make_plan"),
    (None, (), "got a NoneType"),
    (nn.Linear(2, 2), 5, r"5 is of type int; give globs"),
    (nn.Linear(2, 2), [5], r"5 is of type int; give globs"),
    (nn.Linear(2, 2), None, r"None is of type NoneType; give globs"),
    (nn.Linear(2, 2), _mlp(), r"give globs"),
]


@pytest.mark.parametrize(("module", "units", "says"), BAD)
def test_wrong_arguments(module: Any, units: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        fs.split(module, units=units)
