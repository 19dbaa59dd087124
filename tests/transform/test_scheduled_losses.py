"""Derivatives of ``fs.func.sharded_loss`` on schedules: values, what travels, departures, what has none."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.schedule import check
from fshard.transform.scheduled_loss import KINDS
from tests.shared.bad import attempt
from tests.transform import cases as cases
from tests.transform.test_scheduled_products import UNITS, Layers
from tests.transform.test_transforms import FLAT, LOSSES, differences, mine

F = torch.func
X = cases.batch()
Case = Callable[[Any, Any, Any, Any], Any]

TWO = torch.tensor(2.0).double()


def pullback(f: Any, p: Any, x: Any) -> Callable[[Tensor], Any]:
    """The gradient times a cotangent, as a function of that."""
    pull: Any = F.vjp(lambda p: f(p, x), p)[1]
    return lambda by: pull(by)[0]


SCHEDULED: dict[str, Case] = {
    name: cases.CASES[name]
    for name in ("grad", "grad and value", "vjp", "jacrev", "jvp", "forward over reverse", "reverse over forward")
} | {
    "of a function of it": lambda f, p, v, x: F.jvp(F.grad(lambda p: f(p, x).square()), (p,), (v,)),
    "along the point": lambda f, p, v, x: F.grad(lambda p: F.jvp(lambda q: f(q, x), (p,), (p,))[1])(p),
    "of a function of the point": lambda f, p, v, x: F.jvp(F.grad(lambda p: f(tree.map(torch.sin, p), x)), (p,), (v,))[
        1
    ],
    "along the value beside a gradient": lambda f, p, v, x: F.jvp(lambda p: beside(f, p, x), (p,), (v,)),
    "several cotangents": lambda f, p, v, x: cases.add(torch.vmap(pullback(f, p, x))(torch.arange(3.0).double())),
    "linear in the cotangent": lambda f, p, v, x: F.jvp(pullback(f, p, x), (TWO,), (3 * TWO,)),
}
"""What runs on a schedule."""


def after(f: Any, p: Any, v: Any, x: Any) -> Any:
    """The gradient of a slope by the direction, by plain autograd."""
    v = tree.map(lambda leaf: leaf.clone().requires_grad_(), v)
    kept = [leaf for path, leaf in tree.paths(v) if path != "frozen"]
    slope = F.jvp(lambda p: f(p, x), (p,), (v,))[1]
    found = iter(torch.autograd.grad(slope, kept))
    return tree.nest({k: torch.zeros_like(x) if k == "frozen" else next(found) for k, x in tree.paths(v)})


def beside(f: Any, p: Any, x: Any) -> Any:
    """The value beside a gradient, times an entry of that."""
    grads, value = F.grad_and_value(lambda p: f(p, x))(p)
    return value * grads["scale"].sum()


UNSCHEDULED: dict[str, Case] = {
    name: cases.CASES[name] for name in ("value", "reverse over reverse", "vmap over directions", "double backward")
} | {
    "by the direction": lambda f, p, v, x: F.grad(lambda v: F.jvp(lambda p: f(p, x), (p,), (v,))[1])(v),
    "by the direction, recorded": after,
    "of the value beside a gradient": lambda f, p, v, x: F.grad(lambda p: beside(f, p, x))(p),
}
"""What has none: values are right all the same."""

Some = dict[str, Tensor]


def halves(p: Any) -> tuple[Some, Some]:
    """The leaves of a tree in two parts: its table and its first layer, and all others."""
    flat = dict(tree.paths(p))
    first = {path: leaf for path, leaf in flat.items() if path.startswith(("table", "layers.0"))}
    return first, {path: leaf for path, leaf in flat.items() if path not in first}


def of_halves(f: Any, p: Any, x: Any) -> Callable[[Some, Some], Tensor]:
    """The loss as a function of the two parts."""

    def loss(a: Some, b: Some) -> Tensor:
        both = {**a, **b}
        found: Tensor = f(tree.nest({path: both[path] for path, _ in tree.paths(p)}), x)
        return found

    return loss


def filled(case: Callable[[Callable[..., Any], Some, Some, Some, Some], Any]) -> Case:
    """The derivative that a case takes by some leaves, as a tree of all."""

    def taken(f: Any, p: Any, v: Any, x: Any) -> Any:
        found = case(of_halves(f, p, x), *halves(p), *halves(v))
        if not isinstance(found, dict):
            return found
        return tree.nest({path: found.get(path, torch.zeros_like(leaf)) for path, leaf in tree.paths(p)})

    return taken


def value_and_slope(g: Any, a: Some, b: Some, v: Some, u: Some) -> Any:
    """Both as one value, along a direction that depends on the other part."""
    along = {**u, "layers.1.norm": u["layers.1.norm"] * a["layers.0.norm"]}
    return sum(F.jvp(lambda b: g(a, b), (b,), (along,)))


BY_SOME: dict[str, Case] = {
    "by one part": filled(lambda g, a, b, v, u: F.grad(g)(a, b)),
    "by the other": filled(lambda g, a, b, v, u: F.grad(g, argnums=1)(a, b)),
    "of a closure": filled(lambda g, a, b, v, u: F.vjp(lambda a: g(a, b), a)[1](TWO)[0]),
    "value beside it": filled(lambda g, a, b, v, u: F.grad_and_value(g)(a, b)[1]),
    "along one part": filled(lambda g, a, b, v, u: F.jvp(lambda a: g(a, b), (a,), (v,))),
    "of one along the other": filled(
        lambda g, a, b, v, u: F.jvp(lambda b: F.grad(lambda a: g(a, b))(a), (b,), (u,))[1]
    ),
    "of one along itself": filled(lambda g, a, b, v, u: F.jvp(lambda a: F.grad(g)(a, b), (a,), (v,))[1]),
    "of all along one": filled(
        lambda g, a, b, v, u: F.jvp(lambda a: (lambda d: d[0] | d[1])(F.grad(g, (0, 1))(a, b)), (a,), (v,))[1]
    ),
    "of one along all": filled(lambda g, a, b, v, u: F.jvp(F.grad(g), (a, b), (v, u))[1]),
    "of a slope along the other": filled(
        lambda g, a, b, v, u: F.grad(lambda a: F.jvp(lambda b: g(a, b), (b,), (u,))[1])(a)
    ),
    "of a slope along itself": filled(
        lambda g, a, b, v, u: F.grad(lambda a: F.jvp(lambda a: g(a, b), (a,), (v,))[1])(a)
    ),
    "of value and slope": filled(lambda g, a, b, v, u: F.grad(lambda a: value_and_slope(g, a, b, v, u))(a)),
    "detached": lambda f, p, v, x: F.grad(lambda p: f({**p, "table": p["table"].detach()}, x) * p["scale"])(p),
    "shared by two arguments": lambda f, p, v, x: tree.map(
        torch.add, *F.grad(lambda p, q: f({**p, "scale": q["scale"] * p["scale"]}, x), argnums=(0, 1))(p, p)
    ),
    "of a value and its gradient": lambda f, p, v, x: F.jvp(
        lambda s: torch.mul(*F.grad_and_value(lambda s: f({**p, "scale": s}, x))(s)), (p["scale"],), (v["scale"],)
    ),
    "of all along one outside": lambda f, p, v, x: F.jvp(
        lambda s: F.grad(lambda q: f({**q, "scale": s * q["scale"]}, x))(p), (p["scale"],), (p["scale"],)
    ),
}
"""Derivatives by some of the leaves, which schedules have, too."""

SCHEDULED |= BY_SOME


def wanted(case: Case, loss: str) -> Any:
    """The same on whole tensors."""
    return case(cases.reference(LOSSES[loss]), cases.whole(), cases.directions(), X)


def runs(reshard: bool) -> list[str]:
    """On a rank: what is wrong."""
    out: list[str] = []
    with fs.make_mesh(*FLAT) as mesh:
        plan, x = cases.plan_on(mesh), mine(X, mesh)
        params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
        for number, (name, case) in enumerate([*SCHEDULED.items(), *UNSCHEDULED.items()]):
            loss = ("weighted", "mean")[number % 2]
            f = fs.func.sharded_loss(LOSSES[loss], plan, reshard=reshard)
            first, second = case(f, params, v, x), case(f, params, v, x)
            out += differences(second, wanted(case, loss), plan, f"{name}")
            out += [f"{name}: bits"] * any(
                not torch.equal(a, b) for a, b in zip(*map(tree.leaves, (first, second)), strict=True)
            )
            if name in SCHEDULED:
                out += [f"{name}: record"] * (f.record != f.schedule.ops)
            else:
                out += [f"{name}: scheduled"] * ("as transforms do" not in attempt(lambda f=f: f.schedule).text)
    return out


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.slow)])
def test_they_equal_one_process(ranks: int) -> None:
    assert not sum(fs.virtual_mesh((ranks,), ("any",)).run(runs, ranks == 2), [])


@pytest.mark.parametrize("reshard", [True, False])
def test_collectives_are_those_of_the_formula(reshard: bool) -> None:
    def found() -> list[Counter[str]]:
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            layers, out = Layers(mesh), []
            f = fs.func.sharded_loss(layers.loss, layers.plan, reshard=reshard)
            params, x = fs.shard(layers.whole, layers.plan), mine(layers.x, mesh)
            along = tree.map(torch.cos, params)
            for call in (
                lambda: F.grad(f)(params, x),
                lambda: F.jvp(lambda p: f(p, x), (params,), (along,)),
                lambda: F.jvp(lambda p: F.grad(f)(p, x), (params,), (along,)),
            ):
                call()
                check(f.schedule)
                out.append(Counter(op.kind for op in f.schedule))
            return out

    again = (UNITS - fs.Policy().prefetch - 1) * reshard  # units that are gathered once more for their backward
    for counts in fs.virtual_mesh((2,), ("any",)).run(found):
        gathers = [each["all_gather"] for each in counts]
        assert gathers == [UNITS + again, 2 * UNITS, 2 * (UNITS + again)]
        # The product, and the gradient beside it, which torch.func hands out as well.
        assert [each["reduce_scatter"] for each in counts] == [UNITS, 0, 2 * UNITS]


def test_a_program_that_leaves_its_schedule_is_right() -> None:
    def wrong() -> list[float]:
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            layers = Layers(mesh)
            f = fs.func.sharded_loss(layers.loss, layers.plan)

            def product(p: Any, v: Any, x: Tensor) -> Any:
                return F.jvp(lambda p: F.grad(f)(p, x), (p,), (v,))[1]

            out = [layers.wrong(product)]
            layers.order.reverse()
            return [*out, layers.wrong(product), layers.wrong(product)]

    for found in fs.virtual_mesh((2,), ("any",)).run(wrong):
        assert max(found) < 1e-9, found


def test_all_ranks_gather_where_units_run_if_one_finds_no_schedule() -> None:
    def on_rank() -> tuple[list[str], str]:
        with fs.make_mesh(*FLAT) as mesh:
            plan, x = cases.plan_on(mesh), mine(X, mesh)

            def loss(p: Any, x: Any) -> Any:
                if mesh.rank == 1:
                    bool(x["w"].sum() > 0)  # a trace has no values
                return cases.weighted_loss(p, x)

            f = fs.func.sharded_loss(loss, plan)
            got = F.grad(f)(fs.shard(cases.whole(), plan), x)
            found = differences(got, wanted(cases.CASES["grad"], "weighted"), plan, "grad")
            return found, attempt(lambda: f.schedule).text

    for found, why in fs.virtual_mesh((2,), ("any",)).run(on_rank):
        assert not found and ("another rank" in why or "values" in why), why


def test_value_and_grad_of_a_derivative_has_one() -> None:
    plan = cases.plan_on(fs.make_mesh((1,), ("shard",)))
    gradient = fs.value_and_grad(cases.weighted_loss, plan)
    params, v = fs.shard(cases.whole(), plan), fs.shard(cases.directions(), plan)
    got = F.jvp(lambda p: gradient(p, X)[1], (params,), (v,))[1]
    assert not differences(got, wanted(cases.CASES["forward over reverse"], "weighted"), plan, "product")
    assert gradient.loss.record == gradient.loss.schedule.ops


def of_both(f: Any, p: Any, by: Tensor) -> Any:
    return F.grad(f, argnums=(0, 1))(p, by)[1]


def along_both(f: Any, p: Any, by: Tensor) -> Any:
    return F.jvp(f, (p, by), (p, torch.ones_like(by)))[1]


def along_a_gradient(f: Any, p: Any, by: Tensor) -> Any:
    return F.jvp(lambda p, by: F.grad(f)(p, by)["w"].sum(), (p, by), (p, torch.ones_like(by)))[1]


def of_a_slope(f: Any, p: Any, by: Tensor) -> Any:
    return F.grad(lambda p, by: F.jvp(f, (p, by), (p, torch.ones_like(by)))[1], argnums=(0, 1))(p, by)[1]


def recorded(f: Any, p: Any, by: Tensor) -> Any:
    by = by.clone().requires_grad_()
    return torch.autograd.grad(F.jvp(lambda p: f(p, by), (p,), (p,))[1] + F.grad(f)(p, by)["w"].sum(), by)[0]


@pytest.mark.parametrize("taken", [of_both, along_both, along_a_gradient, of_a_slope, recorded])
def test_derivatives_by_what_is_no_argument_are_not_missed(taken: Callable[..., Any]) -> None:
    """A loss may read, beside its arguments, what transforms around it derive by."""
    plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    p, x, by = {"w": torch.arange(1.0, 4.0)}, torch.ones(3), torch.tensor(3.0)

    def plain(p: Any, by: Tensor) -> Tensor:
        return ((p["w"] * by).sin() * x).sum()

    def ours(p: Any, by: Tensor) -> Tensor:
        found: Tensor = fs.func.sharded_loss(lambda p, x: ((p["w"] * by).sin() * x).sum(), plan)(p, x)
        return found

    torch.testing.assert_close(taken(ours, p, by), taken(plain, p, by))


def test_a_value_that_begins_to_take_part_later_is_told() -> None:
    plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    p, x, held = {"w": torch.ones(3)}, torch.ones(3), [torch.tensor(3.0)]
    f = fs.func.sharded_loss(lambda p, x: (p["w"] * held[0] * x).sum(), plan)

    def of(p: Any, by: Tensor) -> Any:
        held[0] = by
        return f(p, x)

    F.grad(f)(p, x)
    with pytest.raises(fs.errors.ScheduleError, match=r"shape \(\) that takes part .* Give it with the batch"):
        F.grad(of, argnums=(0, 1))(p, torch.tensor(2.0))


def test_derivatives_by_a_value_of_all_ranks_are_added_up_by_pvary() -> None:
    def on_rank() -> list[float]:
        with fs.make_mesh((-1,), ("data",)) as mesh:
            plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))])
            p, x = fs.shard({"w": torch.ones(4)}, plan), torch.full((4,), mesh.rank + 1.0)

            def of(by: Tensor) -> Any:
                return fs.func.sharded_loss(lambda p, x: (p["w"] * x).sum() * by, plan)(p, x)

            by = torch.tensor(2.0)
            shared = F.grad(lambda by: of(fs.collectives.pvary(by, "data", mesh=mesh)))(by)
            return [float(F.grad(of)(by)), float(shared)]

    assert fs.virtual_mesh((2,), ("any",)).run(on_rank) == [[2.0, 6.0], [4.0, 6.0]]


def test_only_what_is_taken_is_reduced_and_moves() -> None:
    def found() -> list[tuple[int, int]]:
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            layers, out = Layers(mesh), []
            f = fs.func.sharded_loss(layers.loss, layers.plan, reshard=False)
            params, x = fs.shard(layers.whole, layers.plan), mine(layers.x, mesh)
            for first in params:
                rest = {name: part for name, part in params.items() if name != first}
                one = {first: params[first]}
                F.grad(lambda one, rest=rest: f({**rest, **one}, x))(one)
                check(f.schedule)
                kinds = Counter(op.kind for op in f.schedule)
                F.jvp(lambda one, rest=rest: f({**rest, **one}, x), (one,), (one,))
                out.append((kinds["reduce_scatter"], sum(op.kind == "all_gather" for op in f.schedule)))
            assert len(f._by_kind) == min(2 * len(params), KINDS)
            return out

    for counts in fs.virtual_mesh((2,), ("any",)).run(found):
        assert counts == [(1, UNITS + 1)] * len(counts)


@pytest.mark.parametrize("reshard", [True, False])
def test_a_gradient_is_that_of_the_mask_of_its_value(reshard: bool) -> None:
    def on_rank() -> None:
        with fs.make_mesh((-1,), ("data",)) as mesh:
            whole = {"layer": {"w": torch.ones(4, 4).double()}}
            plan = fs.make_plan(whole, mesh, [(".*", fs.fsdp("data"))])
            drops = fs.unit(lambda p, x: torch.dropout(x @ p["w"], 0.5, True))
            f = fs.func.sharded_loss(lambda p, x: drops(p["layer"], x).sum(), plan, reshard=reshard)
            params, x = fs.shard(whole, plan), torch.arange(1.0, 13.0).double().view(3, 4) * (1 + mesh.rank)
            for _ in range(2):
                gradient, value = F.grad_and_value(f)(params, x)
                check(f.schedule)
                # The loss is linear in the parameters.
                torch.testing.assert_close(tree.vdot(gradient, params, plan), value, rtol=1e-12, atol=0)

    fs.virtual_mesh((2,), ("any",)).run(on_rank)
