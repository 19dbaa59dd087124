"""Derivatives that the code of a step function takes: the values of plain PyTorch, on the step's schedule."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

import fshard as fs
from fshard import tree
from fshard.errors import LossError, PlanError, TreeError
from tests.shared.workers import Pools

RATE, STEPS, TOLERANCE = 0.05, 2, 1e-12
Flat = dict[str, Tensor]
Loss = Callable[[Any, Any], Tensor]


def net() -> torch.nn.Module:
    """A net of three units in float64."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)]
    return torch.nn.Sequential(*layers).double()


def rows() -> tuple[Tensor, Tensor]:
    """A global batch."""
    made = torch.Generator().manual_seed(1)
    return tuple(torch.randn(8, n, generator=made, dtype=torch.float64) for n in (5, 3))  # type: ignore[return-value]


def moved(params: Any, v: Any, alpha: float) -> Any:
    """Parameters a little further."""
    return tree.map(lambda x, y: x + alpha * y, params, v)


def by_jvp(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """A Hessian times a vector, forward over reverse."""
    return jvp(lambda p: grad(f)(p, batch), (params,), (v,))[1]


def by_vjp(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """A Hessian times a vector, reverse over reverse."""
    return vjp(lambda p: grad(f)(p, batch), params)[1](v)[0]


def of_slope(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """A Hessian times a vector, reverse over forward."""
    return grad(lambda p: jvp(lambda q: f(q, batch), (p,), (v,))[1])(params)


def by_grad(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """A gradient a little further."""
    return grad(f)(moved(params, v, 0.1), batch)


def by_autograd(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """The same by autograd."""
    leaves, spec = tree.flatten(moved(params, v, 0.1))
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return tree.unflatten(spec, list(torch.autograd.grad(f(tree.unflatten(spec, leaves), batch), leaves)))


def of_shards(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """A derivative of code that touches each element by itself: no rank needs another."""
    return tree.map(lambda x, y: grad(lambda z: (torch.sin(z) * y).sum())(x), params, v)


def of_elements(f: Loss, params: Any, v: Any, batch: Any) -> Any:
    """A batch of derivatives of such code."""
    two = tree.map(lambda y: torch.stack((y, y * y)), v)
    each = vmap(lambda y: tree.map(lambda x, z: jvp(torch.tanh, (x,), (z,))[1], params, y))(two)
    return tree.map(lambda x: x.sum(0), each)


KINDS = [by_jvp, by_vjp, of_slope, by_grad, by_autograd, of_shards, of_elements]
PROGRAMS = [(kind,) for kind in KINDS[:5]] + [tuple(random.Random(seed).choices(KINDS, k=3)) for seed in range(2)]


def direction(f: Loss, params: Any, v: Any, batch: Any, program: Any) -> Any:
    """What a program of derivatives makes of a gradient."""
    for kind in program:
        v = kind(f, params, v, batch)
    return v


def plainly(program: Any) -> Flat:
    """The parameters after some steps of plain PyTorch."""
    made, batch = net(), rows()

    def f(params: Flat, batch: Any) -> Tensor:
        return (functional_call(made, params, (batch[0],)) - batch[1]).square().sum(1).mean()

    params = {path: leaf.detach().clone() for path, leaf in made.named_parameters()}
    for _ in range(STEPS):
        v = direction(f, params, grad(f)(params, batch), batch, program)
        params = moved(params, v, -RATE)
    return params


def steps_on(mesh: Any, program: Any) -> tuple[Flat, Any]:
    """The same by a step function on a mesh, and its step."""
    model = fs.split(net(), units=("*",))
    plan = fs.make_plan(model, mesh, [("0.bias", fs.P()), (".*", fs.fsdp("data"))], batch=fs.P("data"))

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (model.apply(params, batch[0]) - batch[1]).square().sum(1).mean()

    f, opt = fs.func.sharded_loss(loss_fn, plan), fs.optim.sgd(RATE)
    gradient, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)

    def fn(state: Any, batch: Any) -> Any:
        _, v = gradient(state, batch)
        return update(state, direction(f, state.params, v, batch, program))

    step, state = fs.make_step(fn, plan), fs.init_state(plan, opt, params=model.params)
    for _ in range(STEPS):
        state, _ = step(state, plan.local_batch(rows()))
    assert step.record == step.schedule.ops
    return dict(tree.paths(fs.unshard(state.params, plan))), step


def far(mine: Flat, theirs: Flat) -> float:
    """The largest difference."""
    return max(float((mine[path] - leaf).abs().max()) for path, leaf in theirs.items())


@pytest.mark.parametrize("kind", [of_shards, of_elements])
def test_derivatives_of_code_on_shards_alone_are_refused(kind: Any) -> None:
    """Nothing tells them from arithmetic that depends on how leaves are cut."""
    with pytest.raises(TreeError, match=r"leaf 0\.weight"):
        steps_on(fs.virtual_mesh((2,), ("data",)), (kind,))


@pytest.mark.parametrize("program", [(by_jvp,), (of_shards, by_grad)])
def test_derivatives_in_a_step_function_are_those_of_plain_pytorch(program: Any) -> None:
    assert far(steps_on(fs.virtual_mesh((2,), ("data",)), program)[0], plainly(program)) < TOLERANCE


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: "-".join(kind.__name__ for kind in program))
def test_programs_of_derivatives_on_every_mesh(ranks: int, program: Any) -> None:
    assert far(steps_on(fs.virtual_mesh((ranks,), ("data",)), program)[0], plainly(program)) < TOLERANCE


def on_rank(programs: Any) -> list[float]:
    """On a rank: how far from plain PyTorch each program is."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        return [far(steps_on(mesh, program)[0], plainly(program)) for program in programs]


@pytest.mark.slow
@pytest.mark.processes
def test_derivatives_in_a_step_function_on_processes(pool: Pools) -> None:
    for found in pool(2).run(on_rank, [(by_jvp,), (of_slope, by_grad)]):
        assert max(found) < TOLERANCE


@pytest.mark.parametrize("debug", [False, True])
def test_products_are_part_of_the_schedule(debug: bool) -> None:
    params, mesh = {"w": torch.arange(1.0, 5.0).double()}, fs.virtual_mesh((2,), ("data",))
    plan, opt = fs.make_plan(params, mesh, [("w", fs.fsdp("data"))], batch=fs.P("data")), fs.optim.sgd(RATE)

    def loss_fn(p: Any, x: Tensor) -> fs.Mean:
        return fs.Mean((p["w"] * x).square().sum(), len(x))

    gradient, update = fs.value_and_grad(loss_fn, plan), fs.make_update(opt, plan)
    product, along = fs.func.hvp(loss_fn, plan), fs.func.jvp(loss_fn, plan)
    f = fs.func.sharded_loss(loss_fn, plan, debug=debug)

    def fn(state: Any, batch: Any) -> Any:
        loss, g = gradient(state, batch)
        value, slope = along(state.params, g, batch)
        state, _ = update(state, product(state.params, g, batch))
        return state, (loss, value, slope, f(g, batch))

    step, state = fs.make_step(fn, plan), fs.init_state(plan, opt, params=params)
    x, w = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()[:, None].expand(4, 4), params["w"]
    h = 2 * x.square().mean(0)
    state, (loss, value, slope, other) = step(state, x)
    assert loss == value and torch.isclose(slope, (h * w).square().sum())
    assert torch.isclose(other, ((h * w) ** 2 * h / 2).sum())
    assert torch.allclose(state.params["w"], w - RATE * h * h * w)
    assert step.record == step.schedule.ops


def test_a_rank_that_fails_in_a_derivative_leaves_every_state_as_it_was() -> None:
    params, mesh = {"w": torch.ones(4)}, fs.virtual_mesh((2,), ("data",))
    plan, opt, armed = fs.make_plan(params, mesh, [("w", fs.fsdp("data"))]), fs.optim.sgd(RATE), list[int]()

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        if mesh.here.rank in armed:
            raise ValueError("by hand")
        return (p["w"] * x).square().mean()

    f = fs.func.sharded_loss(loss_fn, plan)
    gradient, update = fs.value_and_grad(lambda p, x: (p["w"] * x).sum(), plan), fs.make_update(opt, plan)

    def fn(state: Any, batch: Any) -> Any:
        _, g = gradient(state, batch)
        return update(state, by_jvp(f, state.params, g, batch))

    step, state, x = fs.make_step(fn, plan), fs.init_state(plan, opt, params=params), torch.ones(4, 4)
    state, _ = step(state, x)
    before = fs.unshard(state.params, plan)["w"].clone()
    armed.append(1)
    with pytest.raises(ValueError, match="by hand"):
        step(state, x)
    armed.clear()
    assert torch.equal(fs.unshard(state.params, plan)["w"], before)
    step(state, x)


def test_losses_without_a_common_mean_are_refused_in_a_step_too() -> None:
    params, mesh = {"w": torch.ones(4)}, fs.virtual_mesh((2,), ("data",))
    plan, opt = fs.make_plan(params, mesh, [("w", fs.fsdp("data"))]), fs.optim.sgd(RATE)

    def unlike(p: Any, x: Tensor) -> Any:
        total = (p["w"] * x).sum()
        return total if mesh.here.rank else fs.Mean(total, 3)

    f = fs.func.sharded_loss(unlike, plan)
    gradient, update = fs.value_and_grad(lambda p, x: (p["w"] * x).sum(), plan), fs.make_update(opt, plan)

    def fn(state: Any, batch: Any) -> Any:
        _, g = gradient(state, batch)
        return update(state, grad(f)(fs.tree.add(state.params, g), batch))

    step, state = fs.make_step(fn, plan), fs.init_state(plan, opt, params=params)
    with pytest.raises(LossError, match=r"fs\.Mean"):
        step(state, torch.ones(4, 4))
    assert state.params["w"].tolist() == [1.0] * 4


def test_a_step_that_runs_part_by_part_says_why() -> None:
    params, mesh = {"w": torch.ones(4)}, fs.make_mesh((1,), ("data",))
    plan, opt = fs.make_plan(params, mesh, [("w", fs.fsdp("data"))]), fs.optim.sgd(RATE)
    gradient, update = fs.value_and_grad(lambda p, x: (p["w"] * x).sum(), plan), fs.make_update(opt, plan)

    def fn(state: Any, batch: Any) -> Any:
        loss, g = gradient(state, batch)
        return update(state, g if loss.item() > 0 else fs.tree.scale(g, 2.0))

    step, state = fs.make_step(fn, plan), fs.init_state(plan, opt, params=params)
    with pytest.raises(PlanError, match="run it once"):
        print(step.schedule)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            state, _ = step(state, torch.ones(4))
    why = r"it asks for values that a trace does not have, at .*test_derivatives\.py:\d+"
    for told in (lambda: step.schedule, lambda: step.trace(state, torch.ones(4))):
        with pytest.raises(PlanError, match=f"part by part, since {why}"):
            told()
    assert len(said) == 1 and "one by one, since it asks" in str(said[0].message)
