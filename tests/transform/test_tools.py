"""The tools on sharded losses, on real ranks, against plain PyTorch on whole tensors in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from tests.shared.virtual import Job
from tests.transform import cases as cases
from tests.transform.test_transforms import FLAT, HSDP, Axes, _far, differences, mine

F = torch.func
X = cases.batch()
PLAIN = cases.reference(cases.weighted_loss)
KEY = fs.random.key(4)


def flat(p: Any) -> Tensor:
    return torch.cat([leaf.flatten() for _, leaf in tree.paths(p)])


def whole_hvp(v: Any) -> Any:
    return F.jvp(lambda p: F.grad(PLAIN)(p, X), (cases.whole(),), (v,))[1]


def outer_loss(out: Tensor, batch: Any) -> Any:
    losses = torch.nn.functional.cross_entropy(out, batch["y"], reduction="none")
    return fs.Mean((losses * batch["w"]).sum(), batch["w"].sum())


def whole_gnvp(v: Any) -> Any:
    def out(p: Any) -> Tensor:
        return cases.predict({**p, "frozen": p["frozen"].detach()}, X)

    p = cases.whole()
    jv = F.jvp(out, (p,), (v,))[1]
    curved = F.jvp(F.grad(lambda o: outer_loss(o, X).value), (out(p),), (jv,))[1]
    return F.vjp(out, p)[1](curved)[0]


def whole_samples(rows: slice) -> Any:
    x = tree.map(lambda leaf: leaf[rows], {k: X[k] for k in ("x", "y")})
    single = F.grad(lambda p, row: cases.mean_loss(p, tree.map(lambda leaf: leaf[None], row)))
    return torch.vmap(single, (None, 0))(cases.whole(), x)


def tools(axes: Axes) -> list[str]:
    """On a rank: what differs from plain PyTorch."""
    out: list[str] = []
    with fs.make_mesh(*axes) as mesh:
        plan, x, v = cases.plan_on(mesh), mine(X, mesh), cases.directions()
        params, along = fs.shard(cases.whole(), plan), fs.shard(v, plan)
        pairs: dict[str, tuple[Any, Any]] = {
            "hvp": (fs.func.hvp(cases.weighted_loss, plan)(params, along, x), whole_hvp(v)),
            "gnvp": (fs.func.gnvp(cases.predict, outer_loss, plan)(params, along, x), whole_gnvp(v)),
            "jvp": (
                fs.func.jvp(cases.weighted_loss, plan)(params, along, x),
                F.jvp(lambda p: PLAIN(p, X), (cases.whole(),), (v,)),
            ),
            "vdot": (fs.tree.vdot(params, along, plan), flat(cases.whole()) @ flat(v)),
            "norm": (fs.tree.norm(params, plan), flat(cases.whole()).norm()),
            "grad of norm": (
                F.grad(lambda p: fs.tree.norm(p, plan))(params),
                F.grad(lambda p: flat(p).norm())(cases.whole()),
            ),
        }
        out += [line for name, (got, want) in pairs.items() for line in differences(got, want, plan, name)]
        out += samples(plan, params, mine({k: X[k] for k in ("x", "y")}, mesh))
        out += probes(plan, params, x)
    return out


def samples(plan: fs.Plan, params: Any, x: Any) -> list[str]:
    mesh, out = plan.mesh, []
    rows = len(x["x"])
    want = dict(tree.paths(whole_samples(slice(mesh.rank * rows, (mesh.rank + 1) * rows))))
    got = dict(tree.paths(fs.func.per_sample_grad(cases.mean_loss, plan)(params, x)))
    out += ["frozen"] * ("frozen" in got)
    for path in got:
        out += _far(got[path], want[path], f"per sample {path}")
    every = dict(tree.paths(whole_samples(slice(None))))
    every["frozen"].zero_()
    norms = sum(g.reshape(len(g), -1).square().sum(1) for g in every.values()).sqrt()  # type: ignore[union-attr]
    limit = norms.median().item()
    factor = (limit / norms).clamp(max=1)
    summed = tree.nest({path: torch.tensordot(factor, g, 1) for path, g in every.items()})
    for microbatch in (None, 2):
        clipped, own = fs.func.clipped_grad(cases.mean_loss, plan, limit, microbatch=microbatch)(params, x)
        out += _far(own, norms.chunk(mesh.size)[mesh.rank], "norms")
        out += differences(clipped, summed, plan, f"clipped {microbatch}")
    return out


def probes(plan: fs.Plan, params: Any, x: Any) -> list[str]:
    out = []
    alone = cases.plan_on(fs.abstract_mesh((1,), ("shard",)))
    for make in (fs.tree.normal, fs.tree.rademacher):
        out += differences(make(KEY, plan), fs.unshard(make(KEY, alone), alone), plan, make.__name__)
    signs = [fs.unshard(fs.tree.rademacher(fs.random.fold_in(KEY, i), alone), alone) for i in range(3)]
    want = torch.stack([flat(s) @ flat(whole_hvp(s)) for s in signs])
    return out + _far(fs.func.hessian_trace_samples(cases.weighted_loss, plan, 3)(params, x, KEY), want, "trace")


@pytest.mark.parametrize("world", [2, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (1, 4))])
def test_equal_to_plain_pytorch(job: Job, world: int) -> None:
    assert not sum(job(world).run(tools, FLAT), [])


def test_on_replicas_of_shards(job: Job) -> None:
    assert not sum(job(4).run(tools, HSDP), [])


def engine(axes: Axes) -> list[str]:
    """On a rank: value_and_grad on the executor, and on the path of transforms."""
    out = []
    with fs.make_mesh(*axes) as mesh:
        plan, x = cases.plan_on(mesh), mine(X, mesh)
        params = fs.shard(cases.whole(), plan)
        want = F.grad_and_value(PLAIN)(cases.whole(), X)[::-1]
        f = fs.value_and_grad(cases.weighted_loss, plan)
        for turn in range(2):
            found = f(params, x)
            out += differences(found, want, plan, f"turn {turn}")
        if list(f.record) != list(f.schedule.ops):
            out.append("the record is not the schedule")
        first = dict(tree.paths(found[1]))["table"].clone()
        f(tree.map(lambda leaf: 2 * leaf, params), x)
        out += ["overwritten"] * (not torch.equal(first, dict(tree.paths(found[1]))["table"]))
        along = fs.shard(cases.directions(), plan)
        got = F.jvp(lambda p: f(p, x)[1], (params,), (along,))[1]
        out += differences(got, whole_hvp(cases.directions()), plan, "under jvp")
        leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        value, _ = f(leaves, x)
        value.backward()
        got = tree.map(lambda leaf: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, leaves)
        out += differences(got, want[1], plan, "with requires_grad")

        def with_aux(p: Any, b: Any) -> Any:
            loss = cases.weighted_loss(p, b)
            return loss, {"mean": fs.Mean(loss.total * 2, loss.count), "own": torch.tensor([mesh.rank])}

        for inside in (False, True):
            g = fs.value_and_grad(with_aux, plan, has_aux=True)
            (value, aux), grads = g._transformed(params, x) if inside else g(params, x)
            out += differences((value, grads), want, plan, f"aux {inside}")
            out += [f"aux {aux}"] * (abs(aux["mean"] - 2 * want[0]) > 1e-6 or aux["own"] != mesh.rank)
    return out


@pytest.mark.parametrize("world", [1, 2, 3])
def test_value_and_grad(job: Job, world: int) -> None:
    assert not sum(job(world).run(engine, FLAT), [])


@pytest.mark.long
@pytest.mark.parametrize(
    ("opt", "plain"),
    [
        (fs.optim.sgd(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (
            fs.optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        ),
        (
            fs.optim.adamw(0.1, betas=(0.8, 0.9), weight_decay=0.1),
            lambda p: torch.optim.AdamW(p, 0.1, betas=(0.8, 0.9), weight_decay=0.1),
        ),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_differentiable_updates(opt: Any, plain: Any) -> None:
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    shards = fs.shard(cases.whole(), plan)
    update = fs.func.differentiable(opt, plan)
    state, params = update.init(shards), shards
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in tree.paths(shards) if path != "frozen"}
    theirs = plain(list(leaves.values()))
    f = fs.func.sharded_loss(cases.weighted_loss, plan)
    for _ in range(3):
        grads = F.grad(f)(params, X)
        params, state = update(params, grads, state)
        for path, leaf in leaves.items():
            leaf.grad = dict(tree.paths(grads))[path].clone()
        theirs.step()
    found = dict(tree.paths(params))
    assert all(torch.allclose(found[path], leaf, rtol=1e-9, atol=1e-12) for path, leaf in leaves.items())
    assert torch.equal(found["frozen"], dict(tree.paths(shards))["frozen"]) and state["step"] == 3

    def adapted(p: Any) -> Tensor:
        state = update.init(p)
        for _ in range(2):
            p, state = update(p, F.grad(f)(p, X), state)
        return f(p, X)

    slope = F.jvp(adapted, (shards,), (fs.shard(cases.directions(), plan),))[1]
    gradient = F.grad(adapted)(shards)
    assert torch.allclose(slope, fs.tree.vdot(gradient, fs.shard(cases.directions(), plan), plan), rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_short_dtypes_have_the_digits_of_float32(dtype: torch.dtype) -> None:
    params = {"w": torch.full((1001,), 300.0, dtype=dtype), "b": torch.ones(3)}
    plan = fs.make_plan(params, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    assert fs.tree.vdot(params, params, plan).item() == pytest.approx(1001 * 90000 + 3, rel=1e-6)
    assert fs.tree.norm(params, plan).item() == pytest.approx((1001 * 90000 + 3) ** 0.5, rel=1e-7)


@pytest.mark.parametrize("tool", ["per_sample_grad", "clipped_grad"])
def test_samples_whose_leaves_ranks_have_parts_of_are_refused(tool: str) -> None:
    """Norms would be of parts, others on each rank."""
    whole = {"up": torch.ones(4, 2), "down": torch.ones(2, 4)}
    mesh = fs.abstract_mesh((1, 2), ("data", "tp"))
    rules = fs.parallel.megatron_rules(column="up", row="down", flat="data")[:-1]
    plan = fs.make_plan(whole, mesh, rules, batch=fs.P("data"))
    make = getattr(fs.func, tool)
    with pytest.raises(
        fs.errors.PlanError, match=r"parts of 2 leaves, such as up \[4, 2\].*axes \('tp',\) have one rank"
    ):
        make(lambda params, batch: params["up"].sum(), plan, *((1.0,) if tool == "clipped_grad" else ()))
