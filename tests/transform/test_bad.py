"""What cannot be right under transforms raises, on all ranks alike, and says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import P, errors, tree
from tests.shared.workers import Pools
from tests.transform import cases as cases
from tests.transform.test_transforms import FLAT, mine

F = torch.func
X = cases.batch()


def raised(call: Callable[[], Any]) -> str:
    """``Class: message`` of what a call raised; empty if nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step_in_transform(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    opt, x = fs.optim.sgd(0.1), mine(X, mesh)
    state = fs.init_state(plan, opt, params=cases.whole())
    step = fs.make_train_step(cases.weighted_loss, opt, plan, donate=True)
    evaluate = fs.make_eval_step(cases.weighted_loss, plan)
    one = torch.ones(())
    calls = [
        lambda: F.grad(lambda s: step(state, {**x, "w": s * x["w"]})[1].loss)(one),
        lambda: torch.vmap(lambda s: step(state, {**x, "w": s * x["w"]})[1].loss)(torch.ones(2)),
        lambda: F.jvp(lambda s: evaluate(state, {**x, "w": s * x["w"]}), (one,), (one,)),
    ]
    return [raised(call) for call in calls]


def loss_raises_on_one(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    def loss(p: Any, x: Any) -> Any:
        if mesh.rank == mesh.size - 1:
            raise ZeroDivisionError("no such luck")
        return cases.weighted_loss(p, x)

    f = fs.func.sharded_loss(loss, plan)
    return [raised(lambda: F.grad(f)(fs.shard(cases.whole(), plan), mine(X, mesh)))]


def uneven(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    x = tree.map(lambda leaf: leaf[: 1 + mesh.rank], X)
    params = fs.shard(cases.whole(), plan)
    found = raised(lambda: F.grad(fs.func.sharded_loss(cases.mean_loss, plan))(params, x))
    return [found] if mesh.size > 1 else []


def unlike(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    f = fs.func.sharded_loss(lambda p, x: (cases.weighted_loss if mesh.rank else cases.mean_loss)(p, x), plan)
    return [raised(lambda: f(fs.shard(cases.whole(), plan), mine(X, mesh)))] if mesh.size > 1 else []


def writes(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    def on_params(p: Any, x: Any) -> Any:
        p["scale"].mul_(2)
        return cases.weighted_loss(p, x)

    def on_batch(p: Any, x: Any) -> Any:
        x["w"].mul_(2)
        return cases.weighted_loss(p, x)

    params, x = fs.shard(cases.whole(), plan), tree.map(torch.clone, mine(X, mesh))
    calls = [on_params, on_batch]
    return [raised(lambda loss=loss: fs.func.sharded_loss(loss, plan)(params, x)) for loss in calls] + [
        raised(lambda loss=loss: F.grad(fs.func.sharded_loss(loss, plan))(params, x)) for loss in calls
    ]


def bad_params(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    params = fs.shard(cases.whole(), plan)
    if mesh.rank == mesh.size - 1:  # on one rank alone
        del params["scale"]
    return [raised(lambda: F.grad(fs.func.sharded_loss(cases.weighted_loss, plan))(params, mine(X, mesh)))]


def linearized(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    f, params = fs.func.sharded_loss(cases.weighted_loss, plan), fs.shard(cases.whole(), plan)
    x = mine(X, mesh)
    return [raised(lambda: F.linearize(lambda p: f(p, x), params))] if mesh.size > 1 else []


def with_aux(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    f = fs.func.sharded_loss(lambda p, x: (cases.weighted_loss(p, x), {"a": 1}), plan)
    return [raised(lambda: f(fs.shard(cases.whole(), plan), mine(X, mesh)))]


def depends_on_rank(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    def loss(p: Any, x: Any) -> Any:
        found = cases.weighted_loss(p, x)
        return fs.Mean(found.total * (1 + mesh.rank), found.count)

    params, x = fs.shard(cases.whole(), plan), mine(X, mesh)
    fs.func.sharded_loss(cases.weighted_loss, plan, debug=True)(params, x)  # this one does not
    F.grad(fs.func.sharded_loss(cases.weighted_loss, plan, debug=True))(params, x)
    return [raised(lambda: fs.func.sharded_loss(loss, plan, debug=True)(params, x))] if mesh.size > 1 else []


def replicas_differ(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    params = fs.shard(cases.whole(), plan)
    params["scale"] = params["scale"] + mesh.rank
    f = fs.func.sharded_loss(cases.weighted_loss, plan, debug=True)
    return [raised(lambda: f(params, mine(X, mesh)))] if mesh.size > 1 else []


def dropout_from_nowhere(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    net = fs.split(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double(), units=("0", "1"))
    own = fs.make_plan(net, mesh, [(r".*", fs.fsdp("shard"))])
    drops = fs.unit(lambda p, x: torch.dropout(x @ p["weight"], 0.5, True))
    f = fs.func.sharded_loss(lambda p, x: drops(p["0"], x).sum(), own, reshard=True, debug=True)  # on no schedule
    x = torch.ones(2, 4).double()
    return [raised(lambda: F.grad(f)(fs.shard(net.params, own), x))] if mesh.size > 1 else []


def single_elements(mesh: fs.Mesh, plan: fs.Plan) -> list[str]:
    layer = fs.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
    whole = {"0": {"w": torch.ones(32, 2).double(), "b": torch.ones(2).double()}}
    x = mine({"x": torch.ones(4, 32).double()}, mesh)["x"]
    found = []
    for rules in ([(r".*w", fs.fsdp("shard")), (r".*", P())], [(r".*w", P("shard")), (r".*", P())]):
        own = fs.make_plan(whole, mesh, rules, units=("*",))
        f, shards = fs.func.sharded_loss(lambda p, x: layer(p["0"], x).square().mean(), own), fs.shard(whole, own)
        for take in (F.hessian, F.jacfwd, lambda g: F.jacrev(F.grad(g)), lambda g: F.jacfwd(F.jacfwd(g))):
            found.append(raised(lambda f=f, take=take, shards=shards: take(lambda p: f(p, x))(shards)))
        # Batches of directions that belong together are none of that.
        seeds = tree.map(lambda leaf: torch.stack((torch.ones_like(leaf), torch.zeros_like(leaf))), shards)
        torch.vmap(lambda v, f=f, shards=shards: F.jvp(lambda p: f(p, x), (shards,), (v,))[1])(seeds)
    bias = whole["0"]["b"]
    F.hessian(lambda b: f(fs.shard({"0": {"w": whole["0"]["w"], "b": b}}, own), x))(bias)
    return found if mesh.size > 1 else []


CASES: dict[str, tuple[Callable[..., list[str]], str, str]] = {
    "a step in a transform": (step_in_transform, "TransformError", "fs.value_and_grad"),
    "a loss that raises": (loss_raises_on_one, "ZeroDivisionError|PeerError", "no such luck"),
    "uneven rows": (uneven, "BatchError", "fs.Mean"),
    "unlike losses": (unlike, "LossError", "types and names"),
    "writes": (writes, "UnitError", "wrote in place"),
    "bad params": (bad_params, "TreeError|PeerError", "scale"),
    "linearize": (linearized, "TransformError", "linearize"),
    "aux without has_aux": (with_aux, "LossError", "has_aux=True"),
    "a loss that depends on the rank": (depends_on_rank, "ReplicationError", "part of the batch"),
    "replicas that differ": (replicas_differ, "ReplicationError", "params scale"),
    "single elements": (single_elements, "TransformError", "single elements of shards"),
    "torch's own dropout in a unit": (dropout_from_nowhere, "RematError", "fs.random"),
}


def on_rank(name: str) -> list[str]:
    """On a rank: what the case raised."""
    with fs.make_mesh(*FLAT) as mesh:
        return CASES[name][0](mesh, cases.plan_on(mesh))


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_raises_on_all_ranks(pool: Pools, world: int, name: str) -> None:
    _, kinds, words = CASES[name]
    found = pool(world).run(on_rank, name)
    assert all(len(messages) == len(found[0]) for messages in found)
    for message in sum(found, []):
        assert message.partition(":")[0] in kinds.split("|") and words in message, message or "nothing was raised"


def alone() -> fs.Plan:
    return cases.plan_on(fs.make_mesh((1,), ("shard",)))


def test_arguments_out_of_range() -> None:
    plan = alone()
    for call in (
        lambda: fs.func.clipped_grad(cases.mean_loss, plan, 0.0),
        lambda: fs.func.clipped_grad(cases.mean_loss, plan, 1.0, microbatch=0),
        lambda: fs.func.hessian_trace_samples(cases.mean_loss, plan, 0),
        lambda: fs.value_and_grad(cases.mean_loss, plan, schedule=fs.Policy(update="in_backward")),
    ):
        with pytest.raises(errors.PlanError):
            call()
    params = fs.shard(cases.whole(), plan)
    with pytest.raises(errors.BatchError, match="one row a sample"):
        fs.func.per_sample_grad(cases.mean_loss, plan)(params, {"x": X["x"], "y": X["y"][:3]})
    with pytest.raises(errors.TreeError, match="v has"):
        fs.func.hvp(cases.mean_loss, plan)(params, {}, X)
    update = fs.func.differentiable(fs.optim.adamw(0.1), plan)
    with pytest.raises(errors.TreeError, match="make it with .init"):
        update(params, params, {"step": 0})


def test_an_abstract_mesh_has_no_losses() -> None:
    plan = cases.plan_on(fs.abstract_mesh((2,), ("shard",)))
    with pytest.raises(errors.PlanError, match="abstract"):
        fs.func.sharded_loss(cases.mean_loss, plan)({}, X)


@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives_that_would_mix_samples(ranks: int) -> None:
    mesh = fs.virtual_mesh((ranks,), ("shard",))
    plan = cases.plan_on(mesh)

    def loss(params: Any, batch: Any) -> Any:
        return fs.collectives.psum(cases.mean_loss(params, batch), "shard")

    def refused() -> list[str]:
        params, x, found = fs.shard(cases.whole(), plan), plan.local_batch({"x": X["x"], "y": X["y"]}), []
        for tool in (fs.func.per_sample_grad(loss, plan), fs.func.clipped_grad(loss, plan, 1.0)):
            with pytest.raises(errors.TransformError, match="would mix one sample of each rank") as caught:
                tool(params, x)
            found.append(str(caught.value))
        return found

    assert len(mesh.run(refused)) == ranks
