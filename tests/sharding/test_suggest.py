"""What is proposed to those who have no units and no rules yet."""

import warnings

import pytest
import torch
from torch import nn

import fshard as fs
from fshard.errors import PlanError


class Net(nn.Module):
    """Blocks of blocks, and leaves outside of them."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        layers = [nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(8)]
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.register_parameter("count", nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))


def meta() -> Net:
    with fs.empty_weights():
        return Net()


def test_units() -> None:
    assert fs.suggest_units(meta()) == ("model.layers.*",)
    assert fs.split(meta(), units=fs.suggest_units(meta())).units == tuple(f"model.layers.{n}" for n in range(8))
    assert fs.suggest_units(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ("*",)
    assert fs.suggest_units(nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 2)})) == ("a", "b")
    assert fs.suggest_units(nn.Linear(2, 2)) == ()
    with pytest.raises(PlanError, match="takes an nn.Module"):
        fs.suggest_units({})  # type: ignore[arg-type]


def test_rules() -> None:
    def axes(*names: str) -> object:
        return fs.suggest_rules(meta(), fs.abstract_mesh((2,) * len(names), names))[-1][1]  # type: ignore[index]

    assert axes("data") == fs.fsdp("data") and axes("replica", "data", "tp") == fs.fsdp("data")
    assert axes("data", "cp") == fs.fsdp(("data", "cp")) and axes("replica", "context") == fs.fsdp("context")
    assert axes("a", "b") == fs.fsdp(("a", "b")) and axes("stage", "data") == fs.fsdp("data")
    mesh = fs.abstract_mesh((2, 2), ("replica", "data"))
    rules = fs.suggest_rules(meta(), mesh)
    model = fs.split(meta(), units=fs.suggest_units(meta()))
    plan = fs.make_plan(model, mesh, rules, batch=fs.P(("replica", "data")))
    assert plan.leaves["count"].at_rest == fs.P() and plan.leaves["embed.weight"].at_rest == fs.P(flat="data")
    assert fs.make_plan(model, mesh, "auto", batch=plan.batch) == plan
    assert fs.make_plan({"w": torch.ones(4)}, mesh, "auto", batch=plan.batch).leaves["w"].at_rest == fs.P(flat="data")
    with pytest.raises(PlanError, match=r"rules is 'car'.*or \"auto\""):
        fs.make_plan(model, mesh, "car", batch=plan.batch)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"every axis of \('tp',\)"):
        axes("tp")


def test_a_plan_without_units_says_what_it_costs() -> None:
    mesh, rules = fs.abstract_mesh((2,), ("data",)), [(".*", fs.fsdp("data"))]
    with pytest.warns(
        UserWarning, match=r"all of its 16\.\d MiB at once.*units=\('model.layers.\*',\)\) gathers"
    ) as seen:
        fs.make_plan(fs.split(meta()), mesh, [("count", fs.P()), *rules])
    assert [one.filename for one in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.make_plan(fs.split(meta(), units=("model.layers.*",)), mesh, [("count", fs.P()), *rules])
        fs.make_plan(fs.split(meta()), fs.abstract_mesh((1,), ("data",)), [("count", fs.P()), *rules])
        fs.make_plan(fs.split(meta()), mesh, [(".*", fs.P())])
        fs.make_plan(fs.split(nn.Linear(2000, 2000)), mesh, rules)  # nothing repeats
