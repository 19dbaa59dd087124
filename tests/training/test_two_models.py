"""Two models in one process, on different meshes: nothing is shared by accident."""

import copy
import pickle
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, tree
from fshard.errors import PlanError
from tests.shared import zoo
from tests.shared.bad import Raised, attempt
from tests.shared.virtual import Job
from tests.shared.workers import Pools

STEPS = 4
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
                fs.unshard(fs.settle(models["reference"]["state"]).params, models["reference"]["plan"])
        held = {name: _memory(fs.settle(model["state"])) for name, model in models.items()}
        shared = [f"{a} and {b}" for a in held for b in held if a < b and held[a] & held[b]]
    return apart, together, shared


def _memory(state: fs.TrainState) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree.leaves((state.params, state.opt_state)) if leaf.numel()}


def test_models_that_train_in_turns_train_as_they_do_apart(job: Job) -> None:
    ranks = job(4).run(apart_and_together)
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
        fourth = fs.init_state(plan, opt, shards=first.params)
        held = [_memory(state) for state in (first, second, third, fourth)]
        apart = len(set.union(*held)) == sum(map(len, held)) > 0
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


def distilled() -> list[Any]:
    """On a rank: a student whose loss reads a state of its teacher that went on training; then the state itself."""
    with fs.make_mesh((2,), ("shard",)) as mesh:
        whole = {"w": torch.linspace(-1, 1, 12).view(3, 4)}
        plan, opt = fs.make_plan(whole, mesh, [(r".*", P())]), fs.optim.sgd(0.1)
        teach = fs.make_train_step(lambda p, x: (x @ p["w"].t()).square().mean(), opt, plan)
        teacher, pupil = (fs.init_state(plan, opt, params=whole) for _ in range(2))
        x = torch.ones(2, 4) + mesh.rank

        def follow(seen: dict[str, torch.Tensor]) -> Any:
            step = fs.make_train_step(lambda p, x: (x @ (p["w"] - seen["w"]).t()).square().mean(), opt, plan)
            return lambda: float(step(pupil, x)[1].loss)

        stale = follow(teacher.params)
        teacher, _ = teach(teacher, x)
        found = [attempt(stale), attempt(lambda: pupil.params["w"].sum().item()), None]
        found[2] = follow(teacher.params)()
        return found


def test_a_state_that_was_donated_is_not_read_by_another_models_loss(pool: Pools) -> None:
    for stale, pupil, fresh in pool(2).run(distilled):
        assert "DonatedError" in stale.kinds and "read it from the state that the step returned" in stale.text
        assert pupil is None and fresh > 0  # the step that failed has left the student's state as it was


def test_a_tensor_has_one_place_in_a_plan() -> None:
    """The same leaf in two trees of one plan, each of which would have been updated by itself."""
    policy = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 2))
    critic = torch.nn.Sequential(policy[0], torch.nn.Linear(4, 1))
    mesh, rules = fs.abstract_mesh((2,), ("shard",)), [(r".*", fs.fsdp("shard"))]
    parts = {"policy": fs.split(policy).params, "critic": fs.split(critic).params}
    told = r"(?s)1 of 6 leaves.*critic\.0\.weight  \[5, 4\] lies where policy\.0\.weight  \[5, 4\].*clone one"
    with pytest.raises(PlanError, match=told):
        fs.make_plan(parts, mesh, rules)
    both = fs.split(torch.nn.ModuleDict({"policy": policy, "critic": critic}))  # what the message advises
    leaves = fs.make_plan(both, mesh, rules).leaves
    assert "critic.0.weight" not in leaves and leaves["policy.0.weight"].aliases == ("critic.0.weight",)
    apart = {"policy": parts["policy"], "critic": tree.map(torch.clone, parts["critic"])}
    assert len(fs.make_plan(apart, mesh, rules).leaves) == 6


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("other", [lambda w: w, lambda w: w.t(), lambda w: w.detach()[:2], lambda w: w.view(-1)])
def test_views_of_a_leaf_are_no_leaves(other: Any, device: str) -> None:
    mesh, w = fs.abstract_mesh((2,), ("shard",)), torch.empty(4, 6, device=device)
    with pytest.raises(PlanError, match=r"b  \[.*\] lies where a  \[4, 6\]"):
        fs.make_plan({"a": w, "b": other(w)}, mesh, [(r".*", P())])
    rest = {"b": w[2:], "c": torch.empty(4, 6, device=device), "d": w[:0], "e": w[:, :0]}
    fs.make_plan({"a": w[:2], **rest}, mesh, [(r".*", P())])


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
    schedule = step.trace(torch.zeros(3, 4)).schedule
    assert [group.name for group in schedule.groups] == names


def _scale(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"] * p["n"]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda mesh: pickle.loads(pickle.dumps(mesh))])
def test_an_abstract_mesh_is_a_value(how: Any) -> None:
    mesh = fs.abstract_mesh((2, 2), ("replica", "shard"), rank=3)
    assert how(mesh) == mesh


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("spec", [fs.fsdp("shard"), P()])
def test_states_that_take_turns_in_one_step(spec: Any, donate: bool, compute: torch.dtype | None) -> None:
    """On one rank leaves are views of the shards of a state: each step reads those of the state that it is given."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ params["w"]).square().mean()

    plan = fs.make_plan(
        {"w": torch.zeros(3, 2)},
        fs.make_mesh((1,), ("shard",)),
        [(".*", spec)],
        precision=None if compute is None else fs.Precision(compute),
    )
    opt = fs.optim.adamw(0.1)
    batches = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n), dtype=compute) for n in range(3)]

    def run(seeds: list[int]) -> dict[int, list[float]]:
        step, look = fs.make_train_step(loss, opt, plan, donate=donate), fs.make_eval_step(loss, plan)
        starts = {seed: {"w": torch.full((3, 2), float(seed))} for seed in seeds}
        states = {seed: fs.init_state(plan, opt, params=start) for seed, start in starts.items()}
        found: dict[int, list[float]] = {seed: [] for seed in seeds}
        for batch in batches:
            for seed in seeds:
                states[seed], metrics = step(states[seed], batch)
                found[seed] += [float(metrics.loss), float(look(states[seed], batch))]
        return found

    assert run([1, 2]) == run([1]) | run([2])
