"""DTensor trees and state dicts of torch.nn and torch.optim: to and from train states."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError, TreeError
from fshard.state.entries import entries
from tests.interchange.test_export import EXPERTS, LEAVES, OPT, one, placed
from tests.shared.workers import Pools


def dtensors(sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    """On a rank: a tree to DTensors and back, and what DTensor itself distributes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    with fs.make_mesh(sizes, names) as mesh:
        whole = {**LEAVES, "d": torch.randn(4, 4), "s": torch.tensor(3.0)}
        del whole["e"]
        rules = [("b", P("shard")), ("c", P()), ("d", P(*names)), (".*", fs.fsdp("shard"))]
        plan = fs.make_plan(whole, mesh, rules, batch=P("shard"))
        state = fs.init_state(plan, OPT, params=whole)
        theirs = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        placed = fs.io.to_dtensor(state.params, plan, device_mesh=theirs)
        for path, leaf in placed.items():
            assert isinstance(leaf, DTensor) and torch.equal(leaf.full_tensor(), whole[path]), path
            again = distribute_tensor(whole[path], theirs, leaf.placements)
            assert torch.equal(again.to_local(), leaf.to_local()), path
        spread = {
            path: distribute_tensor(leaf, theirs, [Shard(0)] * len(sizes)) for path, leaf in whole.items() if leaf.ndim
        }
        summed = DTensor.from_local(torch.tensor(3.0) / mesh.size, theirs, [Partial()] * len(sizes))
        for tree_ in (placed, {**spread, "s": whole["s"]}, {**spread, "s": summed}):
            back = fs.io.from_dtensor(tree_, plan)
            for path, leaf in tree.paths(state.params):
                torch.testing.assert_close(back[path], leaf, rtol=0, atol=0 if path != "s" else 1e-6)
        with pytest.raises(TreeError, match="unknown  x"):
            fs.io.from_dtensor({**placed, "x": placed["b"]}, plan)
        with pytest.raises(TreeError, match="a DTensor; use fs.io.from_dtensor"):
            fs.io.from_state_dict(placed, plan, OPT)
        wrong = init_device_mesh("cpu", (mesh.size, 1), mesh_dim_names=("x", "y"))
        with pytest.raises(PlanError, match="device_mesh has dims"):
            fs.io.to_dtensor(state.params, plan, device_mesh=wrong)
        with pytest.raises(TreeError, match="lies on"):
            fs.io.from_dtensor({**placed, "b": distribute_tensor(whole["b"], wrong)}, plan)
        dist.barrier()


@pytest.mark.parametrize(("sizes", "names"), [((2,), ("shard",)), ((2, 2), ("shard", "tp")), ((2, 2), ("tp", "shard"))])
def test_trees_become_dtensors_and_back(pool: Pools, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
    pool(math.prod(sizes)).run(dtensors, sizes, names)


def test_a_dtensor_needs_processes() -> None:
    plan, state = one()
    with pytest.raises(PlanError, match="needs a process group"):
        fs.io.to_dtensor(state.params, plan)


def linears() -> nn.Module:
    """A module with a tied weight."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    return module


TORCH = {
    "adamw": (lambda ps: torch.optim.AdamW(ps, 0.01, weight_decay=0.2), fs.optim.adamw(0.01, weight_decay=0.2)),
    "sgd": (lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9), fs.optim.sgd(0.01, momentum=0.9)),
    "plain sgd": (lambda ps: torch.optim.SGD(ps, 0.01), fs.optim.sgd(0.01)),
    "adagrad": (lambda ps: torch.optim.Adagrad(ps, 0.01), fs.optim.from_torch(torch.optim.Adagrad, lr=0.01)),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_go_on_here_and_back(name: str, named: bool) -> None:
    make, opt = TORCH[name]
    module = linears()
    theirs = make(module.named_parameters() if named else module.parameters())
    for _ in range(3):
        module(torch.randn(8, 4)).square().mean().backward()
        theirs.step()
    plan = fs.make_plan(fs.split(module), fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    counted = {} if "sgd" not in name else {"step": 3}
    no_buffers = [(r"2\.(running_.*|num_batches_tracked)", None)]
    state = fs.io.from_state_dict(module.state_dict(), plan, opt, theirs.state_dict(), rename=no_buffers, **counted)
    assert state.step == 3
    full = fs.io.to_state_dict(state, buffers=fs.split(module).buffers)
    assert full.keys() == module.state_dict().keys()
    twin = linears()
    twin.load_state_dict(full)
    ours = make(twin.parameters())
    ours.load_state_dict(fs.io.to_optim_state_dict(state, opt, keys="index"))
    for number, row in theirs.state_dict()["state"].items():
        for key, value in row.items():
            assert value is None or torch.equal(torch.as_tensor(ours.state_dict()["state"][number][key]), value)
    batch = torch.randn(8, 4)
    for job, rule in ((module, theirs), (twin, ours)):
        rule.zero_grad()
        job(batch).square().mean().backward()
        rule.step()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


def test_decay_of_some_leaves_makes_two_groups_and_comes_back() -> None:
    plan, state = one()
    opt = fs.optim.adamw(fs.optim.schedules.linear(0.1, 0.0, 10), decay=fs.optim.matrices)
    found = fs.io.to_optim_state_dict(fs.init_state(plan, opt, params=LEAVES), opt, keys="index")
    assert [(group["weight_decay"], group["lr"], group["param_names"]) for group in found["param_groups"]] == [
        (0.01, 0.1, ["a", "b", "e"]),
        (0.0, 0.1, ["c"]),
    ]
    assert fs.io.from_state_dict(LEAVES, plan, opt, found).step == 0
    for group in found["param_groups"]:
        group.pop("param_names")
    with pytest.raises(TreeError, match="numbers 4 parameters in 2 groups.*named_parameters"):
        fs.io.from_state_dict(LEAVES, plan, opt, found)


def _rows(change: Any) -> dict[str, Any]:
    found = fs.io.to_optim_state_dict(one()[1], OPT)
    change(found)
    return found


BAD_OPTIM: dict[str, tuple[Any, str]] = {
    "nothing": (lambda o: o.clear(), "a dict of 'state' and 'param_groups'"),
    "missing": (lambda o: o["state"]["a"].pop("exp_avg"), r"missing     state.a.exp_avg  \[11, 3\]"),
    "no leaf": (lambda o: o["state"].pop("b"), "missing     state.b.exp_avg "),
    "unexpected": (
        lambda o: o["state"]["a"].update(max_exp_avg_sq=torch.ones(11, 3)),
        "unexpected  state.a.max_exp_avg_sq",
    ),
    "shape": (lambda o: o["state"]["c"].update(exp_avg=torch.ones(7)), r"mismatched  state.c.exp_avg: \[7\], .*\[8\]"),
    "dtype": (lambda o: o["state"]["c"].update(exp_avg=torch.ones(8).double()), "would be rounded"),
    "value": (lambda o: o["state"]["c"].update(exp_avg="x"), "state.c.exp_avg: str"),
}


@pytest.mark.parametrize("name", BAD_OPTIM)
def test_an_optimizer_state_that_does_not_fit(name: str) -> None:
    change, text = BAD_OPTIM[name]
    with pytest.raises(TreeError, match=text):
        fs.io.from_state_dict(LEAVES, one()[0], OPT, _rows(change))


def test_state_dicts_that_do_not_fit() -> None:
    plan, state = one()
    with pytest.raises(TreeError, match="holds values that are not plain tensors:\n  a: ndarray|list"):
        fs.io.from_state_dict({**LEAVES, "a": [1.0]}, plan, OPT)
    with pytest.raises(PlanError, match="keys='path'"):
        fs.io.to_optim_state_dict(state, OPT, keys="path")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="params= and shards="):
        fs.init_state(plan, OPT, params=LEAVES, shards=state.params)
    with pytest.raises(TreeError, match="shards has 1 leaves"):
        fs.init_state(plan, OPT, shards={"a": state.params["a"]})
    nested = fs.io.to_state_dict(
        fs.init_state(placed(fs.make_mesh((1, 1), ("dp", "ep"))), OPT, params=EXPERTS), nested=True
    )
    assert torch.equal(nested["experts"]["b"], EXPERTS["experts"]["b"])  # type: ignore[index]


def over_more_axes(folder: str) -> None:
    """On a rank: optimizer state that lies over more axes than its parameters, out and in by every way."""
    mesh = fs.make_mesh((2, 2), ("replica", "shard"))
    rules = [fs.Rule(".*", P(flat="shard"), opt=P(flat=("shard", "replica")))]
    plan = fs.make_plan(LEAVES, mesh, rules, batch=P(("replica", "shard")))
    state = fs.init_state(plan, OPT, params=LEAVES)
    for entry in entries(fs.settle(state)):
        if entry.name.startswith("opt."):
            entry.tensor.copy_(torch.arange(entry.piece.start, entry.piece.stop).float())
    full = fs.io.to_optim_state_dict(state, OPT)
    fs.io.save_dcp(state, folder, OPT)
    for found in (state, fs.io.from_state_dict(LEAVES, plan, OPT, full), fs.io.load_dcp(folder, plan, OPT)):
        for path, row in fs.io.to_optim_state_dict(found, OPT)["state"].items():
            numbers = torch.arange(float(LEAVES[path].numel())).view(LEAVES[path].shape)
            assert torch.equal(row["exp_avg"], numbers) and torch.equal(row["exp_avg_sq"], numbers)


def test_optimizer_state_over_more_axes_than_its_parameters(tmp_path: Path) -> None:
    fs.virtual_mesh((2, 2), ("replica", "shard")).run(over_more_axes, str(tmp_path / "dcp"))
