"""Gradients of single samples on schedules: what travels, by formula; departures; what has no schedule, and why."""

from collections import Counter
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import tree
from fshard.schedule import check, parse
from tests.shared.workers import Pools
from tests.transform.test_ghost_norms import off, one_by_one
from tests.transform.test_scheduled_products import UNITS, WIDTH, Layers
from tests.transform.test_transforms import FLAT, differences, mine

ROWS = torch.ones(4, WIDTH).double()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_are_those_of_the_formula(ranks: int, reshard: bool) -> None:
    layers = Layers(fs.abstract_mesh((ranks,), ("shard",)))
    samples = fs.func.per_sample_grad(layers.loss, layers.plan, reshard=reshard)
    clipped = fs.func.clipped_grad(layers.loss, layers.plan, 1.0, reshard=reshard)
    around = fs.Policy().prefetch + 1  # units that stay gathered from one pass to the next
    again = (UNITS - around) * reshard
    for tool, gathers, reductions in ((samples, UNITS + again, 0), (clipped, UNITS + again, UNITS)):
        schedule = tool.trace(ROWS).schedule
        check(schedule)
        assert parse(str(schedule)) == schedule
        counts = Counter(op.kind for op in schedule)
        apart = ranks > 1
        assert (counts["all_gather"], counts["reduce_scatter"]) == (gathers * apart, reductions * apart)
        assert counts["weight"] == reductions
        assert tool.reshard == reshard == schedule.policy.reshard


def test_sums_begin_after_the_norms_and_reductions_are_in_flight() -> None:
    layers = Layers(fs.abstract_mesh((2,), ("shard",)))
    kinds = [op.kind for op in fs.func.clipped_grad(layers.loss, layers.plan, 1.0).trace(ROWS).schedule]
    assert kinds.index("weight") > max(
        at for at, kind in enumerate(kinds) if kind == "backward" and at < len(kinds) - 9
    )
    assert kinds.index("wait reduce_scatter") > kinds.index("reduce_scatter") + 2


def departures() -> list[str]:
    """On a rank: what is wrong where a program leaves its schedule, and where it comes back."""
    out = []
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        params, x = fs.shard(layers.whole, layers.plan), mine(layers.x, mesh)
        clipped = fs.func.clipped_grad(layers.loss, layers.plan, 0.01)
        samples = fs.func.per_sample_grad(layers.loss, layers.plan)
        for turn in range(3):
            if turn == 1:
                layers.order.reverse()
            want = one_by_one(layers.loss, layers.whole, layers.x)
            norms = sum(g.flatten(1).square().sum(1) for g in want.values()).sqrt()  # type: ignore[union-attr]
            factor = (0.01 / norms).clamp(max=1)
            total, found = clipped(params, x)
            got, rows = dict(tree.paths(fs.unshard(total, layers.plan))), dict(tree.paths(samples(params, x)))
            out += [f"{turn} {path}" for path, g in want.items() if off(got[path], torch.tensordot(factor, g, 1))]
            out += [f"{turn} rows of {path}" for path, g in want.items() if off(rows[path], mine(g, mesh))]
            out += [f"{turn} norms"] * off(found, mine(norms, mesh))
            if turn != 1:
                out += [f"{turn} record" for tool in (clipped, samples) if tool.record != tool.schedule.ops]
    return out


@pytest.mark.parametrize("ranks", [1, 2])
def test_programs_that_leave_their_schedule(ranks: int) -> None:
    assert not sum(fs.virtual_mesh((ranks,), ("any",)).run(departures), [])


def test_a_call_without_a_schedule_says_why() -> None:
    layers = Layers(fs.make_mesh((1,), ("shard",)))
    params = fs.shard(layers.whole, layers.plan)
    samples = fs.func.per_sample_grad(layers.loss, layers.plan)
    rows = torch.vmap(lambda p: samples(p, ROWS)["0"]["0"]["bias"])(tree.map(lambda x: x.expand(2, *x.shape), params))
    assert rows.shape == (2, 4, WIDTH)
    with pytest.raises(fs.errors.PlanError, match="no schedule.*since a transform is under way"):
        _ = samples.schedule
    assert torch.allclose(samples(params, ROWS)["0"]["0"]["bias"], rows[0], rtol=1e-10, atol=1e-14)
    assert samples.record == samples.schedule.ops


def values(reshard: bool | None) -> list[str]:
    """On a rank: what differs from the gradients of one sample after the other, and from the same call before."""
    out = []
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        params, x = fs.shard(layers.whole, layers.plan), mine(layers.x, mesh)
        want = one_by_one(layers.loss, layers.whole, layers.x)
        norms = sum(g.flatten(1).square().sum(1) for g in want.values()).sqrt()  # type: ignore[union-attr]
        limit = norms.median().item()
        summed = {path: torch.tensordot((limit / norms).clamp(max=1), g, 1) for path, g in want.items()}
        samples = fs.func.per_sample_grad(layers.loss, layers.plan, reshard=reshard)
        clipped = fs.func.clipped_grad(layers.loss, layers.plan, limit, reshard=reshard)
        (rows, total, found), again = [[samples(params, x), *clipped(params, x)] for _ in range(2)]
        pairs = zip(tree.leaves((rows, total, found)), tree.leaves(tuple(again)), strict=True)
        out += ["another result"] * any(not torch.equal(one, other) for one, other in pairs)
        out += differences(total, tree.nest(summed), layers.plan, "sum") + ["norms"] * off(found, mine(norms, mesh))
        out += [f"rows of {path}" for path, g in tree.paths(rows) if off(g, mine(want[path], mesh))]
        return out + [f"{tool} record" for tool in (samples, clipped) if tool.record != tool.schedule.ops]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_values_are_those_of_one_sample_after_the_other(ranks: int, reshard: bool | None) -> None:
    assert not sum(fs.virtual_mesh((ranks,), ("any",)).run(values, reshard), [])


def test_values_on_real_ranks(pool: Pools) -> None:
    assert not sum(pool(2).run(values, True), [])


def poisson(rows: tuple[int, ...]) -> list[str]:
    """On a rank: what differs from one sample after the other where ranks have so many rows, and some have none.

    Rows are divided by their norms, so that a row of zeros in the place of samples would make all values nan.
    """
    out = []
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return layers.loss(params, x / x.norm(dim=-1, keepdim=True))

        params, x = fs.shard(layers.whole, layers.plan), layers.x[: sum(rows)]
        first, last = sum(rows[: mesh.rank]), sum(rows[: mesh.rank + 1])
        want = one_by_one(loss, layers.whole, x) if len(x) else {}
        norms = sum((g.flatten(1).square().sum(1) for g in want.values()), torch.zeros(len(x))).sqrt()
        summed = {path: torch.tensordot((0.1 / norms).clamp(max=1), g, 1) for path, g in want.items()}
        for microbatch in (None, 2):
            total, found = fs.func.clipped_grad(loss, layers.plan, 0.1, microbatch=microbatch)(params, x[first:last])
            out += differences(total, tree.nest(summed) or tree.map(torch.zeros_like, layers.whole), layers.plan, "sum")
            out += ["norms"] * (
                found.shape != (last - first,) or not torch.allclose(found, norms[first:last].double(), 1e-10)
            )
        each = dict(tree.paths(fs.func.per_sample_grad(loss, layers.plan)(params, x[first:last])))
        out += [f"rows of {path}" for path, g in each.items() if len(g) != last - first]
        return out + [path for path, g in want.items() if not torch.allclose(each[path], g[first:last], 1e-10, 1e-14)]


@pytest.mark.parametrize("rows", [(3, 0), (0, 1), (0, 0)])
def test_a_rank_may_have_no_samples(rows: tuple[int, ...]) -> None:
    assert not sum(fs.virtual_mesh((2,), ("any",)).run(poisson, rows), [])


def noisy() -> bool:
    """On a rank: whether a clipped sum with noise of a tree of shards is the same without a schedule."""
    with fs.make_mesh(*FLAT) as mesh:
        layers = Layers(mesh)
        clipped = fs.func.clipped_grad(layers.loss, layers.plan, 0.01)
        total, _ = clipped(fs.shard(layers.whole, layers.plan), mine(layers.x, mesh))
        noise = fs.tree.normal(fs.random.key(0), layers.plan)
        found = tree.map(lambda g, z: g + 0.5 * z, total, noise)
        return all(
            torch.equal(a, b + 0.5 * z) for a, b, z in zip(*map(tree.leaves, (found, total, noise)), strict=True)
        )


def test_noise_is_added_to_sums() -> None:
    assert all(fs.virtual_mesh((2,), ("any",)).run(noisy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_samples_have_the_dtype_of_leaves(dtype: torch.dtype) -> None:
    """Also where units read them in bfloat16, on a schedule and inside of a transform."""
    shapes = {"up": (8, 6), "bias": (8,), "down": (3, 8), "unread": (2,)}
    params = {path: torch.randn(shape, dtype=dtype) for path, shape in shapes.items()}
    short, mesh = fs.Precision(compute=torch.bfloat16), fs.make_mesh((1,), ("shard",))
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], precision=short)
    shards, x = fs.shard(params, plan), torch.randn(4, 6).bfloat16()

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        linear = torch.nn.functional.linear
        return linear(linear(x, p["up"], p["bias"]).tanh(), p["down"]).square().mean()

    tool = fs.func.per_sample_grad(loss, plan)
    within = torch.vmap(lambda p: tool(p, x))(tree.map(lambda leaf: leaf.expand(1, *leaf.shape), shards))
    want = one_by_one(loss, {path: leaf.bfloat16() for path, leaf in params.items()}, x)
    for rows in (tool(shards, x), tree.map(lambda g: g[0], within)):
        assert all(g.dtype == dtype and g.shape[1:] == shapes[path] for path, g in rows.items())
        assert all((g - want[path]).abs().max() <= 0.02 * want[path].abs().max() for path, g in rows.items())
