"""Losses that take derivatives themselves, by ``torch.func``; PyTorch's gradients of some are wrong without a word."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vjp
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from tests.shared.virtual import Job
from tests.shared.workers import Pools

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, (6,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "solve": lambda x: torch.linalg.solve(x.T @ x + torch.eye(6, dtype=x.dtype), x.T),
    "mse_loss": lambda x: F.mse_loss(x, torch.ones_like(x), reduction="none"),
    "tanh": torch.tanh,
}


class Smooth(nn.Module):
    """A layer whose output goes through one operator."""

    def __init__(self, operator: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.operator = nn.Linear(6, 6).double(), operator

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 6) in and out."""
        return self.operator(self.linear(x))


def _penalty(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, forward: bool) -> Tensor:
    """The squared slope of the sum of cubes along ``v``, by forward or by reverse derivatives."""

    def cubes(x: Tensor) -> Tensor:
        return f(x).pow(3).sum()

    slope = jvp(cubes, (x,), (v,))[1] if forward else (vjp(cubes, x)[1](torch.ones((), dtype=x.dtype))[0] * v).sum()
    return slope.square()


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("units", [(), ("0",)], ids=["code outside of units", "a unit"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_loss_with_a_jvp_has_the_gradient_of_the_same_loss_with_a_vjp(
    name: str, units: tuple[str, ...], compile: str | None
) -> None:
    torch.manual_seed(0)
    mesh = fs.make_mesh((1,), ("shard",))
    model = fs.split(nn.Sequential(Smooth(OPERATORS[name])), units=units)
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))])
    x, v = torch.randn(2, 8, 6, dtype=torch.float64)
    opt = fs.optim.sgd(1e-3)

    def loss_fn(params: Any, batch: Tensor, forward: bool = True) -> Tensor:
        return _penalty(lambda x: model.apply(params, x), batch, v, forward)

    want = grad(lambda params: loss_fn(params, x, forward=False))(model.params)
    start = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(loss_fn, opt, plan, donate=False, compile=compile)
    for _ in range(2):  # the second does not trace
        state, metrics = step(start, x)
        assert metrics.loss.item() == pytest.approx(loss_fn(model.params, x, forward=False).item())
        now = dict(fs.tree.paths(fs.unshard(state.params, plan)))
        before = dict(fs.tree.paths(model.params))
        most = max(gradient.abs().max().item() for _, gradient in fs.tree.paths(want))
        for path, gradient in fs.tree.paths(want):
            moved = (before[path] - now[path]) / 1e-3
            torch.testing.assert_close(moved, gradient, rtol=1e-7, atol=1e-7 * most)
    fs.verify(step, start, x)


def test_plain_pytorch_has_another_gradient() -> None:
    """If this fails, PyTorch has mended its formula, and the first test shows nothing."""
    x, v = torch.randn(2, 8, 6, dtype=torch.float64)
    wrong, right = (
        grad(lambda x, forward=forward: _penalty(OPERATORS["layer_norm"], x, v, forward))(x)
        for forward in (True, False)
    )
    assert (wrong - right).abs().max() > 1e-2


def physics(compile: str | None) -> str:
    """Steps on a loss of derivatives through its units, each held against plain PyTorch."""
    torch.manual_seed(0)
    mesh = fs.make_mesh((-1,), ("shard",))
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)).double() for _ in range(3)]
    model = fs.split(nn.Sequential(*blocks), units=("[01]",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("shard"))], batch=fs.P("shard"))
    opt = fs.optim.adamw(1e-2)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        def f(x: Tensor) -> Tensor:
            return model.apply(params, x).square().sum()

        value, slope = jvp(f, (x,), (torch.ones_like(x),))
        rows = torch.func.vmap(lambda row: f(row[None]))(x)
        return value + slope.square() + grad(f)(x).square().sum() + rows.sum() + model.apply(params, x).mean()

    step = fs.make_train_step(loss_fn, opt, plan, schedule=fs.Policy(prefetch=1), compile=compile)
    state = fs.init_state(plan, opt, params=model.params)
    for number in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * number + mesh.rank))
        fs.verify(step, state, x)
        state, _ = step(state, x)
    return step.units


@pytest.mark.parametrize("compile", [pytest.param(None, marks=pytest.mark.slow), "fx"])
def test_transforms_of_units_in_a_loss_on_two_ranks(pool: Pools, compile: str | None) -> None:
    told = pool(2).run(physics, compile)
    assert compile is None or all("under a transform of torch.func" in units for units in told)


def ascent() -> None:
    """Steps on the loss at the worst point of each rank's own rows, against the mean of these losses in one process."""
    mesh = fs.make_mesh((-1,), ("data",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = fs.split(net, units=("0", "2"))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (model.apply(params, x) - x.sum(1, keepdim=True)).square().mean()

    @fs.unit
    def climbed(params: Any, up: Any, size: Tensor) -> Any:
        return fs.tree.map(lambda p, g: p + size * g, params, up)

    copied = fs.unit(functools.partial(fs.tree.map, torch.clone))

    def worst(params: Any, x: Tensor) -> Tensor:
        mine = {name: copied(part) for name, part in fs.stop_gradient(params).items()}
        mine = fs.tree.map(lambda p: p.requires_grad_(), mine)
        grads = torch.autograd.grad(loss_fn(mine, x), fs.tree.leaves(mine))
        size = 0.5 / torch.stack([g.norm() for g in grads]).norm()
        up = fs.tree.unflatten(fs.tree.flatten(mine)[1], grads)
        return loss_fn({name: climbed(part, up[name], size) for name, part in params.items()}, x)

    policy = fs.Policy(prefetch=2, reduces=2, reshard=False)
    step, state = fs.make_train_step(worst, opt, plan, schedule=policy), fs.init_state(plan, opt, params=model.params)
    plain = fs.tree.map(Tensor.clone, model.params)
    for number in range(3):
        rows = torch.randn(4 * mesh.size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        state, metrics = step(state, plan.local_batch(rows))
        trained = fs.tree.map(lambda p: p.detach().requires_grad_(), plain)
        loss = torch.stack([worst(trained, part) for part in rows.chunk(mesh.size)]).mean()
        trees = dict(fs.tree.paths(trained))
        grads = dict(zip(trees, torch.autograd.grad(loss, list(trees.values())), strict=True))
        assert metrics.loss.item() == pytest.approx(loss.item(), rel=1e-12)
        assert step.record == step.schedule.ops
        plain = fs.tree.nest({path: p.detach() - 0.1 * grads[path] for path, p in trees.items()})
    moved = [(op.kind, op.target) for op in step.schedule if op.kind in ("all_gather", "reduce_scatter")]
    assert len(moved) == len(set(moved)) == (4 if mesh.size > 1 else 0)  # each group once, part by part
    for (path, ours), (_, theirs) in zip(
        fs.tree.paths(fs.unshard(state.params, plan)), fs.tree.paths(plain), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=path)


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_rank_takes_the_gradient_at_the_worst_point_of_its_own_rows(job: Job, ranks: int) -> None:
    job(ranks).run(ascent)


@pytest.mark.parametrize("compile", [None, "fx"])
@pytest.mark.parametrize("start", [0, 2], ids=["rows", "rows that begin inside of a storage"])
@pytest.mark.parametrize("units", [(), ("0",)], ids=["code outside of units", "a unit"])
def test_a_loss_that_fake_tensors_cannot_differentiate_runs_on_real_ones(
    units: tuple[str, ...], start: int, compile: str | None
) -> None:
    """The gradient of a vmap of a Hessian is on the meta device there, or fails an assert of PyTorch's."""
    torch.manual_seed(0)
    model = fs.split(nn.Sequential(Smooth(torch.tanh), nn.Linear(6, 1).double()), units=units)
    plan = fs.make_plan(model, fs.make_mesh((1,), ("shard",)), [(".*", fs.fsdp("shard"))])
    x, opt = torch.randn(5, 6, dtype=torch.float64)[start:], fs.optim.sgd(0.1)

    def loss(params: Any, x: Tensor) -> Tensor:
        bent = torch.func.hessian(lambda row: model.apply(params, row).sum())
        return torch.vmap(bent)(x).square().mean()

    state = fs.init_state(plan, opt, params=model.params)
    step = fs.make_train_step(loss, opt, plan, donate=False, compile=compile)
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in fs.tree.paths(model.params)}
    want = loss(fs.tree.nest(leaves), x)
    grads = torch.autograd.grad(want, list(leaves.values()), allow_unused=True)
    after, metrics = step(state, x)
    torch.testing.assert_close(metrics.loss, want.detach())
    moved = dict(fs.tree.paths(fs.unshard(after.params, plan)))
    for (path, leaf), slope in zip(leaves.items(), grads, strict=True):
        slope = torch.zeros_like(leaf) if slope is None else slope
        torch.testing.assert_close(moved[path], leaf.detach() - 0.1 * slope)
