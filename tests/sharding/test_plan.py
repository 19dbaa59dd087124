"""Plans: what owns which leaf, what a plan checks, and how it prints."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError, TreeError
from tests.shared import modules

GOLDEN = Path(__file__).parent / "goldens" / "plan.txt"


def described() -> fs.Plan:
    """A plan with a tied leaf, a frozen one, several dtypes and every kind of spec, on rank 5 of 8."""
    with torch.device("meta"):
        module = modules.GPT(depth=2)
    module.pos.weight.requires_grad_(False)
    module.blocks[1].to(torch.bfloat16)
    model = fs.split(module, units=("blocks.*",))
    rules = [
        (r".*norm.*", P()),
        (r"blocks\.0\.mlp\.0\.weight", P("tp", None, flat="shard")),
        (r"blocks\.0\.mlp\.2\.weight", P(None, "tp", flat="shard")),
        (r"blocks\.1\.mlp\.\d\.weight", P("shard", "tp")),
        (r".*", fs.fsdp("shard")),
    ]
    return fs.make_plan(model, fs.abstract_mesh((4, 2), ("shard", "tp"), rank=5), rules, batch=P("shard"))


def test_a_plan_prints_as_it_did() -> None:
    assert str(described()) + "\n" == GOLDEN.read_text()


def test_a_plan_is_a_value() -> None:
    plan = described()
    assert plan == described() and plan is not described()
    elsewhere = dataclasses.replace(plan, mesh=fs.abstract_mesh((4, 2), ("shard", "tp"), rank=4))
    assert plan != elsewhere
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.batch = P()  # type: ignore[misc]


def _tree() -> dict[str, Any]:
    return tree.nest(
        {
            "embed.w": torch.zeros(6, 4),
            "layers.0.a.w": torch.zeros(4, 4),
            "layers.0.b": torch.zeros(4),
            "layers.1.a.w": torch.zeros(4, 4),
            "layers.10.b": torch.zeros(4),
            "layersx.b": torch.zeros(4),
            "head": torch.zeros(4),
        }
    )


def _place(units: tuple[str, ...], params: Any = None) -> fs.Plan:
    mesh = fs.abstract_mesh((2,), ("shard",))
    return fs.make_plan(_tree() if params is None else params, mesh, [(".*", fs.fsdp("shard"))], units=units)


@pytest.mark.parametrize(
    ("units", "owners"),
    [
        ((), ["root"] * 7),
        (("layers.*",), ["root", "layers.0", "layers.0", "layers.1", "layers.10", "root", "root"]),
        (("layers.1*", "embed"), ["embed", "root", "root", "layers.1", "layers.10", "root", "root"]),
        (("layers.0.a", "layers.*"), ["root", "layers.0.a", "layers.0", "layers.1", "layers.10", "root", "root"]),
    ],
)
def test_units_of_a_plain_tree_own_the_leaves_below_them(units: tuple[str, ...], owners: list[str]) -> None:
    plan = _place(units)
    assert [group.unit for path in plan.leaves for group, _ in [plan.places()[path]]] == owners


@pytest.mark.parametrize("pattern", ["layers", "head", "layers.*.c", "nothing"])
def test_patterns_of_units(pattern: str) -> None:
    if pattern == "layers":
        assert {group.unit for group in _place((pattern,)).groups} == {"layers", "root"}
        return
    with pytest.raises(PlanError, match="match no subtree") as caught:
        _place(("layers.*", pattern))
    assert repr(pattern) in str(caught.value) and "'layers.*'" not in str(caught.value)


def test_units_of_a_module_own_its_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    model = fs.split(module, units=("1.*", "2"))
    plan = fs.make_plan(model, fs.abstract_mesh((2,), ("shard",)), [(".*", fs.fsdp("shard"))])
    assert {group.unit: [leaf.path for leaf in group.leaves] for group in plan.groups} == {
        "root": ["0.weight", "0.bias"],
        "1.0": ["1.0.weight", "1.0.bias"],
        "1.1": ["1.1.weight", "1.1.bias"],
        "2": ["2.weight", "2.bias"],
    }


def test_one_axis_is_the_data_axis() -> None:
    assert _place(()).batch == P("shard")
    assert (_place(()).data_axes, _place(()).data_size) == (("shard",), 2)


def test_nothing_to_place() -> None:
    with pytest.raises(PlanError, match="no parameters"):
        _place((), {})


EMPTY: dict[str, tuple[dict[str, Any], str]] = {
    "a layer without leaves": ({"a": {}, "b": {"w": torch.ones(4)}}, "a is an empty dict"),
    "nothing else": ({"a": {}}, "a is an empty dict"),
    "deeper": ({"a": {"w": torch.ones(4), "act": {}}}, r"a\.act is an empty dict.*params\.get\('act', \{\}\)"),
    "a list": ({"a": [], "b": torch.ones(4)}, "a: list"),
    "a tuple": ({"a": (), "b": torch.ones(4)}, "a: tuple"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_part_of_a_tree_is_refused_with_its_path(name: str) -> None:
    """It would be missing in the trees that losses get, and in those of states."""
    params, said = EMPTY[name]
    with pytest.raises((PlanError, TreeError), match=said):
        _place((), params)


WHOLE = {"b": {"w": torch.ones(4)}}
TAKES: dict[str, Callable[[fs.Plan, dict[str, Any]], Any]] = {
    "init_state": lambda plan, params: fs.init_state(plan, params=params),
    "shard": lambda plan, params: fs.shard(params, plan),
    "unshard": lambda plan, params: fs.unshard(params, plan),
    "replace": lambda plan, params: fs.init_state(plan, params=WHOLE).replace(params=params),
    "add": lambda plan, params: fs.tree.add(WHOLE, params),
    "apply": lambda plan, params: fs.split(nn.Linear(1, 1)).apply(params, torch.ones(1)),
    "paths": lambda plan, params: dict(fs.tree.paths(params)),
}


@pytest.mark.parametrize("name", TAKES)
def test_so_it_is_wherever_a_tree_is_given(name: str) -> None:
    plan = fs.make_plan(WHOLE, fs.make_mesh((1,), ("shard",)), [(".*", P(flat="shard"))])
    with pytest.raises(TreeError, match="a is an empty dict"):
        TAKES[name](plan, {"a": {}, **WHOLE})


@pytest.mark.parametrize("whole", [True, False])
def test_a_tree_is_checked_leaf_by_leaf(whole: bool) -> None:
    plan = _place(("layers.*",))
    good = _tree() if whole else fs.shard(_tree(), plan)
    leaves = plan.check_tree(tree.nest(dict(reversed(list(tree.paths(good))))), whole=whole)
    assert list(leaves) == list(plan.leaves)
    bad = {**good, "head": torch.zeros(9), "extra": torch.zeros(1), "embed": {"w": None}}
    del bad["layersx"]
    with pytest.raises(TreeError) as caught:
        plan.check_tree(bad, whole=whole, what="weights")
    text = str(caught.value)
    for part in ("weights has 7 leaves", "missing  layersx.b", "unknown  extra", "no tensor  embed.w: NoneType"):
        assert part in text
    assert f"misshapen  head: [9], the plan has {list(leaves['head'].shape)}" in text
    assert "layers.0" not in text


def test_making_a_plan_makes_no_tensor() -> None:
    params = {"w": torch.empty(1 << 40, 1 << 10, device="meta"), "b": torch.empty(1 << 40, device="meta")}
    plan = fs.make_plan(params, fs.abstract_mesh((1 << 12,), ("shard",), rank=77), [(".*", fs.fsdp("shard"))])
    assert plan.groups[0].numel == (1 << 50) + (1 << 40)
    assert "4.0 PiB" not in str(plan) and "TiB" in str(plan)
