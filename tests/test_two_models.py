"""Two models in one process, on different meshes: nothing is shared by accident."""

import copy
import pickle
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, tree
from tests import zoo
from tests.bad import Raised, attempt
from tests.workers import Pools

STEPS = 6
Losses = dict[str, list[float]]


def _make(name: str, mesh: fs.Mesh, rules: list[Any]) -> dict[str, Any]:
    example = zoo.build(name)
    axes = mesh.axis_names
    plan = fs.make_plan(example.model, mesh, rules, batch=P(axes[0] if len(axes) == 1 else axes), units=example.units)
    opt = fs.optim.adamw(2e-3)
    step = fs.make_train_step(example.loss_fn, opt, plan, debug=True)
    return {"example": example, "plan": plan, "step": step, "state": fs.init_state(plan, opt, params=example.params())}


def _train(model: dict[str, Any], number: int) -> float:
    mesh = model["plan"].mesh
    batch = zoo.cut(model["example"].batch(number), mesh.rank, mesh.size)
    model["state"], metrics = model["step"](model["state"], batch)
    return float(metrics.loss)


def _models(mesh: fs.Mesh, other: fs.Mesh) -> dict[str, Any]:
    return {
        "policy": _make("gpt", mesh, [(r".*norm.*", P()), (r".*", fs.fsdp("shard"))]),
        "reference": _make("gpt", other, [fs.Rule(r".*", fs.fsdp("shard"), opt=fs.fsdp(("shard", "replica")))]),
        "critic": _make("odd", other, [(r".*", fs.fsdp("replica"))]),
    }


def apart_and_together() -> tuple[Losses, Losses, list[str]]:
    """On a rank: the losses of models that train one after the other, and in turns; and which tensors they share."""
    with fs.make_mesh((4,), ("shard",)) as mesh, fs.make_mesh((2, 2), ("replica", "shard")) as other:
        apart = {name: [_train(model, n) for n in range(STEPS)] for name, model in _models(mesh, other).items()}
    with fs.make_mesh((2, 2), ("replica", "shard")) as other, fs.make_mesh((4,), ("shard",)) as mesh:
        models = _models(mesh, other)
        together: Losses = {name: [] for name in models}
        for number in range(STEPS):
            for name in ("critic", "policy", "reference"):
                together[name].append(_train(models[name], number))
            if number == 2:  # reading one state finishes its update, and no other's
                fs.unshard(models["reference"]["state"].params, models["reference"]["plan"])
        held = {name: _memory(model["state"]) for name, model in models.items()}
        shared = [f"{a} and {b}" for a in held for b in held if a < b and held[a] & held[b]]
    return apart, together, shared


def _memory(state: fs.TrainState) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves((state.params, state.opt_state)) if leaf.numel()}


def test_models_that_train_in_turns_train_as_they_do_apart(pool: Pools) -> None:
    ranks = pool(4).run(apart_and_together)
    for apart, together, shared in ranks:
        assert apart == together == ranks[0][0]
        assert not shared


def mixed_up() -> list[Raised]:
    """On a rank: what happens to states, trees and steps of one model in the place of the other's."""
    with fs.make_mesh((2,), ("shard",)) as mesh, fs.make_mesh((2,), ("shard",)) as other:
        one = _make("odd", mesh, [(r".*", fs.fsdp("shard"))])
        two = _make("odd", other, [(r".*", P())])
        batch = zoo.cut(one["example"].batch(0), mesh.rank, mesh.size)
        return [
            attempt(lambda: two["step"](one["state"], batch)),
            attempt(lambda: fs.unshard(one["state"].params, two["plan"])),
        ]


def test_states_of_another_plan_are_refused(pool: Pools) -> None:
    for first, second in pool(2).run(mixed_up):
        assert "TreeError" in first.kinds and "another plan" in first.text
        assert "TreeError" in second.kinds and "misshapen" in second.text


def aliases() -> tuple[bool, list[float], list[float]]:
    """On a rank: whether states made from one tree, or from another state's tensors, share memory; and their losses."""
    with fs.make_mesh((2,), ("shard",)) as mesh:
        rules = [(r".*", P())]  # so that the tensors of a state have the shapes of whole ones
        example = zoo.build("odd")
        plan = fs.make_plan(example.model, mesh, rules, units=example.units)
        opt = fs.optim.sgd(0.05)
        params = example.params()
        first = fs.init_state(plan, opt, params=params)
        second = fs.init_state(plan, opt, params=params)
        third = fs.init_state(plan, opt, params=first.params)
        held = [_memory(state) for state in (first, second, third)]
        apart = not (held[0] & held[1] or held[0] & held[2] or held[1] & held[2])
        step, losses = fs.make_train_step(example.loss_fn, opt, plan), []
        for state in (first, third):  # the first one's memory is donated, and updated in place
            losses.append([])
            for number in range(4):
                state, metrics = step(state, zoo.cut(example.batch(number), mesh.rank, mesh.size))
                losses[-1].append(float(metrics.loss))
        return apart, losses[0], losses[1]


def test_states_made_from_the_same_tensors_share_none(pool: Pools) -> None:
    for apart, first, third in pool(2).run(aliases):
        assert apart and first == third


def copies() -> list[Any]:
    """On a rank: a plan copied, and pickled."""
    with fs.make_mesh((2,), ("shard",)) as mesh:
        model = _make("odd", mesh, [(r".*", fs.fsdp("shard"))])
        plan = model["plan"]
        twin = copy.deepcopy(plan)
        batch = zoo.cut(model["example"].batch(0), mesh.rank, mesh.size)
        step = fs.make_train_step(model["example"].loss_fn, fs.optim.adamw(2e-3), twin)
        _, metrics = step(model["state"], batch)
        sent = pickle.loads(pickle.dumps(plan))
        raised = attempt(lambda: fs.unshard(model["example"].params(), sent))
        return [twin == plan, twin.mesh is mesh, metrics.loss.isfinite().item(), sent == plan, str(sent), raised]


def test_plans_can_be_copied_and_pickled(pool: Pools) -> None:
    for equal, same, finite, sent, text, raised in pool(2).run(copies):
        assert equal and same and finite and sent and text.startswith("mesh shard=2")
        assert "PlanError" in raised.kinds and "processes" in raised.text


def test_a_unit_may_have_the_name_of_another_ones_second_group() -> None:
    params = {"a": {"w": torch.zeros(4, 4), "n": torch.zeros(4)}, "a/1": {"w": torch.zeros(4, 4), "n": torch.zeros(4)}}
    rules = [(r".*\.n", P()), (r".*", fs.fsdp("shard"))]
    mesh = fs.abstract_mesh((2,), ("shard",))
    plan = fs.make_plan(params, mesh, rules, units=("a", "a/1"))
    names = [group.name for group in plan.groups]
    assert len(set(names)) == 4 and {"a", "a/1"} <= set(names)
    first, second = fs.unit(_scale), fs.unit(_scale)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return second(params["a/1"], first(params["a"], x)).mean()

    step = fs.make_train_step(loss, fs.optim.sgd(0.1), plan)
    schedule = step.trace(torch.zeros(3, 4))
    assert [group.name for group in schedule.groups] == names


def _scale(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] * p["n"]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))])
def test_an_abstract_mesh_is_a_value(how: Any) -> None:
    mesh = fs.abstract_mesh((2, 2), ("replica", "shard"), rank=3)
    assert how(mesh) == mesh
