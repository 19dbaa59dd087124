"""``fs.func.sharded_loss`` under every transform, on real ranks, against the plain loss of whole tensors in float64."""

import functools
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from tests.shared.virtual import Job
from tests.shared.workers import Pools
from tests.transform import cases as cases

TOLERANCE = 1e-9
Axes = tuple[tuple[int, ...], tuple[str, ...]]
FLAT: Axes = ((-1,), ("shard",))
HSDP: Axes = ((2, -1), ("replica", "shard"))
LOSSES = {"mean": cases.mean_loss, "weighted": cases.weighted_loss}


@functools.cache
def expected(loss: str, case: str) -> Any:
    """What plain PyTorch finds."""
    f = cases.reference(LOSSES[loss])
    return cases.CASES[case](f, cases.whole(), cases.directions(), cases.batch())


def mine(batch: Any, mesh: fs.Mesh) -> Any:
    """This rank's rows."""
    return tree.map(lambda x: x.chunk(mesh.size)[mesh.rank], batch)


def differences(got: Any, want: Any, plan: fs.Plan, what: str) -> list[str]:
    """Where a result is not the expected one: parameter trees are compared shard by shard."""
    if isinstance(want, tuple):
        pairs = zip(got, want, strict=True)
        return [line for i, (a, b) in enumerate(pairs) for line in differences(a, b, plan, f"{what}[{i}]")]
    if isinstance(want, Tensor):
        return _far(got, want, what)
    flat = dict(tree.paths(got))
    return [
        line for path, leaf in tree.paths(fs.shard(want, plan)) for line in _far(flat[path], leaf, f"{what} {path}")
    ]


def _far(got: Tensor, want: Tensor, what: str) -> list[str]:
    if got.shape != want.shape:
        return [f"{what}: shape {list(got.shape)}, not {list(want.shape)}"]
    error = (got.detach() - want).abs().max().item() if want.numel() else 0.0
    scale = max(want.abs().max().item(), 1e-3) if want.numel() else 1.0
    return [f"{what}: {error / scale:.1e}"] if not error <= TOLERANCE * scale else []


def every_case(axes: Axes, loss: str, reshard: bool, names: tuple[str, ...]) -> list[str]:
    """On a rank: what differs from plain PyTorch."""
    out = []
    with fs.make_mesh(*axes) as mesh:
        plan = cases.plan_on(mesh)
        f = fs.func.sharded_loss(LOSSES[loss], plan, reshard=reshard)
        params, along = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
        for name in names:
            got = cases.CASES[name](f, params, along, mine(cases.batch(), mesh))
            out += differences(got, expected(loss, name), plan, f"{loss} {name}")
    return out


CHEAP = ("grad and value", "forward over reverse", "reverse over reverse", "double backward")


@pytest.mark.parametrize("world", [1, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4))])
def test_equal_to_whole_tensors(job: Job, world: int) -> None:
    names = tuple(cases.CASES)
    assert not sum(job(world).run(every_case, FLAT, "weighted", True, names, timeout=150), [])
    assert not sum(job(world).run(every_case, FLAT, "mean", False, names if world == 3 else CHEAP), [])


def test_replicas_of_shards(pool: Pools) -> None:
    assert not sum(pool(4).run(every_case, HSDP, "weighted", True, CHEAP), [])


def through_whole_trees(axes: Axes) -> list[str]:
    """On a rank: derivatives by whole leaves, through ``fs.shard``, and by shards, through ``fs.unshard``."""
    out = []
    with fs.make_mesh(*axes) as mesh:
        plan, x = cases.plan_on(mesh), mine(cases.batch(), mesh)
        f = fs.func.sharded_loss(cases.weighted_loss, plan)
        plain = cases.of_part(cases.reference(cases.weighted_loss), cases.batch())
        for name, case in cases.ON_WHOLE.items():
            got = tree.leaves(case(cases.of_part(lambda p, x: f(fs.shard(p, plan), x), x)))
            want = tree.leaves(case(plain))
            out += [line for i, pair in enumerate(zip(got, want, strict=True)) for line in _far(*pair, f"{name} {i}")]

        def norms(p: Any) -> Tensor:
            return sum((leaf.norm() ** 3 for _, leaf in tree.paths(p)), torch.zeros(()).double())

        def of_shards(p: Any) -> Tensor:
            return norms(fs.unshard(p, plan))

        params, along = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
        for name in ("grad and value", "forward over reverse", "reverse over reverse", "through three steps"):
            case = cases.CASES[name]
            want = case(lambda p, x: norms(p), cases.whole(), cases.directions(), None)
            out += differences(case(lambda p, x: of_shards(p), params, along, None), want, plan, f"unshard: {name}")
    return out


@pytest.mark.parametrize(
    "axes", [pytest.param(FLAT, marks=pytest.mark.slow), HSDP, ((2, -1), ("tp", "shard"))], ids=str
)
def test_shard_and_unshard_are_each_others_adjoint(job: Job, axes: Axes) -> None:
    if "tp" in axes[1]:
        assert not sum(job(4).run(cut_for_compute, axes), [])
    else:
        assert not sum(job(4).run(through_whole_trees, axes), [])


def cut_for_compute(axes: Axes) -> list[str]:
    """On a rank: whole leaves to shards and back where compute leaves some of them cut."""
    with fs.make_mesh(*axes) as mesh:
        rules = [(r"a", fs.P("tp", None, flat="shard")), (r"b", fs.P(None, "tp")), (r"c", fs.P("shard", "tp"))]
        tensors = {k: torch.randn(4, 6, generator=torch.Generator().manual_seed(i)) for i, k in enumerate("abc")}
        plan = fs.make_plan(tensors, mesh, rules, batch=fs.P("shard"))
        back, pull = torch.func.vjp(lambda p: fs.unshard(fs.shard(p, plan), plan), tensors)
        (grads,) = pull(tensors)
        pairs = [(back[k], tensors[k]) for k in "abc"] + [(grads[k], tensors[k]) for k in "abc"]
        return [f"{i}: {a}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]


def played() -> list[str]:
    """On a rank that is played: cases with and without resharding."""
    names = (*CHEAP, "vmap over an ensemble", "through three steps")
    return every_case(FLAT, "weighted", True, names) + every_case(FLAT, "mean", False, CHEAP)


@pytest.mark.long
def test_on_a_virtual_mesh() -> None:
    assert not sum(fs.virtual_mesh((3,), ("shard",)).run(played), [])


def held_by_a_call(depth: int) -> tuple[int, int]:
    """On a rank: the most whole units that are there while a loss is computed, and those that stay when it is over."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth)))
    model, held = fs.split(net, units=("*",)), []

    def whole() -> int:
        plain = (x for x in gc.get_objects() if type(x) is Tensor and x.device.type == "cpu")
        storages = {x.untyped_storage() for x in plain if not torch._C._functorch.is_functorch_wrapped_tensor(x)}
        return sum(storage.nbytes() >= 64 * 64 * 4 for storage in storages)

    with fs.make_mesh((-1,), ("shard",)) as mesh:
        plan = fs.make_plan(model, mesh, [(r".*", fs.fsdp("shard"))])
        params = fs.init_state(plan, fs.optim.sgd(0.1)).params

        def loss(p: Any, x: Tensor) -> Tensor:
            out = model.apply(p, x)
            held.append(whole())
            return out.sum()

        gc.collect()
        gc.disable()
        try:
            before = whole()
            fs.func.sharded_loss(loss, plan)(params, torch.ones(2, 64))
            return held[0] - before, whole() - before
        finally:
            gc.enable()


def test_units_are_whole_only_while_they_run(pool: Pools) -> None:
    assert pool(2).run(held_by_a_call, 6) == [(0, 0)] * 2
