"""Derivatives of ``fs.func.sharded_loss`` on schedules: values, what travels, departures, what has none."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from fshard.schedule import check
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
    "by one leaf": lambda f, p, v, x: F.grad(lambda scale: f({**p, "scale": scale}, x))(p["scale"]),
}
"""What has none: values are right all the same."""


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
            if name == "by one leaf":
                first, second = ({**tree.map(torch.zeros_like, params), "scale": each} for each in (first, second))
            out += differences(second, full(wanted(case, loss), name), plan, f"{name}")
            out += [f"{name}: bits"] * any(
                not torch.equal(a, b) for a, b in zip(*map(tree.leaves, (first, second)), strict=True)
            )
            if name in SCHEDULED:
                out += [f"{name}: record"] * (f.record != f.schedule.ops)
            else:
                out += [f"{name}: scheduled"] * ("as transforms do" not in attempt(lambda f=f: f.schedule).text)
    return out


def full(want: Any, name: str) -> Any:
    """A tree of the plan."""
    return {**tree.map(torch.zeros_like, cases.whole()), "scale": want} if name == "by one leaf" else want


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


def test_what_has_no_schedule_says_why() -> None:
    plan = fs.make_plan({"w": torch.ones(3)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])

    def loss(p: Any, x: Tensor) -> Any:
        return (p["w"] * x).sum(), {"seen": x.sum()}

    f = fs.func.sharded_loss(loss, plan, has_aux=True)
    grads, aux = F.grad(f, has_aux=True)({"w": torch.ones(3)}, torch.ones(3))
    assert torch.equal(grads["w"], torch.ones(3)) and aux["seen"] == 3
    with pytest.raises(PlanError, match="has_aux"):
        _ = f.schedule
    with pytest.raises(fs.errors.LossError, match="has_aux=True"):
        F.grad(fs.func.sharded_loss(loss, plan))({"w": torch.ones(3)}, torch.ones(3))


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
