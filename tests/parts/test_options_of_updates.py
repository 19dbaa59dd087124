"""Options that ``fs.make_update`` shares with train steps: carried gradients, norms in the metrics, ``skip=``."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import LossError, PlanError

WAYS = ("step", "read", "apart", "parts")


def loss(p: Any, x: Tensor) -> Tensor:
    """Of a matrix, a vector and a leaf that few rows reach."""
    return (torch.tanh(x @ p["w"]) * p["v"]).sum(1).square().mean() + (p["u"] * x[:, :3]).mean()


def params() -> dict[str, Tensor]:
    """The same on every rank."""
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made) for name, shape in (("w", (5, 4)), ("v", (4,)), ("u", (3,)))}


def rows(at: int, rank: int) -> Tensor:
    """The rows of a rank in a step."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * at + rank))


def of_parts(way: str, opt: Any, plan: fs.Plan, **options: Any) -> Any:
    """A step made of parts."""
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(opt, plan, **options)

    def fn(state: Any, x: Tensor) -> Any:
        value, grads = grad(state, x)
        if way == "apart" and value.item() == 123.0:
            raise AssertionError
        state, metrics = update(state, grads)
        if way == "read":
            state = state.replace(params=fs.tree.scale(state.params, 1.0))
        return state, metrics

    return fn if way == "parts" else fs.make_step(fn, plan)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("spec", ["sharded", "ZeRO-1"])
def test_carried_gradients_are_those_of_train_steps(world: int, spec: str) -> None:
    rules = [{"sharded": (".*", fs.fsdp("data")), "ZeRO-1": fs.Rule(".*", fs.P(), opt=fs.fsdp("data"))}[spec]]
    mesh = fs.virtual_mesh((world,), ("data",))
    plan = fs.make_plan(params(), mesh, rules, batch=fs.P("data"))
    opt = fs.optim.every(3, fs.optim.adamw(lambda step: 0.1 / (step + 1), weight_decay=0.1))
    options: dict[str, Any] = {"clip_norm": [("w", 0.05), (".*", 0.2)], "norms": ["v|w", "u"]}

    def main() -> None:
        train = fs.make_train_step(loss, opt, plan, **options)
        expected = []
        state = fs.init_state(plan, opt, params=params())
        for at in range(7):
            state, metrics = train(state, rows(at, mesh.rank))
            found = fs.unshard(fs.settle(state).params, plan)
            expected.append((found, metrics.grad_norm, metrics.grad_norms))
        for way in WAYS:
            step, state = of_parts(way, opt, plan, **options), fs.init_state(plan, opt, params=params())
            for at, (wanted, norm, norms) in enumerate(expected):
                state, metrics = step(state, rows(at, mesh.rank))
                found = fs.unshard(fs.settle(state).params, plan)
                for name, value in wanted.items():
                    assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), (way, at, name)
                assert torch.allclose(metrics.grad_norm, norm, rtol=1e-5), (way, at)
                assert metrics.grad_norms.keys() == {"w", ".*", "v|w", "u"}
                for name, value in norms.items():
                    assert torch.allclose(metrics.grad_norms[name], value, rtol=1e-5), (way, at, name)

    mesh.run(main)


@pytest.mark.filterwarnings("ignore:.*run one by one")
@pytest.mark.parametrize("world", [1, 2])
def test_skip_is_asked_of_the_metrics(world: int) -> None:
    mesh = fs.virtual_mesh((world,), ("data",))
    plan = fs.make_plan(params(), mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)

    def main() -> None:
        for way in [way for way in WAYS if way != "read"]:
            limits = iter([1e9, 0.0, 1e9])
            step = of_parts(
                way, opt, plan, norms="groups", skip=lambda m, limits=limits: m.grad_norms["root"] > next(limits)
            )
            state = fs.init_state(plan, opt, params=params())
            for at, skips in enumerate((False, True, False)):
                before = fs.unshard(fs.settle(state).params, plan)
                state, metrics = step(state, rows(at, mesh.rank))
                after = fs.unshard(fs.settle(state).params, plan)
                assert bool(metrics.skipped) is skips, (way, at)
                assert torch.equal(before["w"], after["w"]) is skips, (way, at)
                assert torch.allclose(metrics.grad_norms["root"], metrics.grad_norm)

    mesh.run(main)


def test_ranks_that_skip_differently_are_an_error_before_the_update() -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    plan = fs.make_plan(params(), mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.1)

    def main() -> None:
        for way in ("step", "parts"):
            step = of_parts(way, opt, plan, skip=lambda _: mesh.rank == 1)
            state = fs.init_state(plan, opt, params=params())
            with pytest.raises(LossError, match="skip="):
                step(state, rows(0, mesh.rank))
            assert torch.equal(fs.unshard(state.params, plan)["w"], params()["w"])

    mesh.run(main)


def test_a_verdict_that_the_step_reads_too_soon_is_refused() -> None:
    mesh = fs.virtual_mesh((1,), ("data",))
    plan = fs.make_plan(params(), mesh, [(".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(0.1)
    grad, update = fs.value_and_grad(loss, plan), fs.make_update(opt, plan, skip=lambda metrics: False)

    def fn(state: Any, x: Tensor) -> Any:
        _, grads = grad(state, x)
        state, metrics = update(state, grads)
        return state, metrics.skipped + 1

    with pytest.raises(PlanError, match="asked at the end of the step"):
        fs.make_step(fn, plan)(fs.init_state(plan, opt, params=params()), rows(0, 0))


def test_norms_of_no_leaf_are_refused() -> None:
    plan = fs.make_plan(params(), fs.virtual_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    with pytest.raises(PlanError, match="norms"):
        fs.make_update(fs.optim.sgd(0.1), plan, only="w", norms=["u"])


@pytest.mark.parametrize("way", ["train", "step"])
def test_losses_that_are_not_finite_count_under_a_loss_scale(way: str) -> None:
    mesh = fs.virtual_mesh((1,), ("data",))
    plan = fs.make_plan(params(), mesh, [(".*", fs.fsdp("data"))])
    opt, options = fs.optim.sgd(0.1), {"skip_norm": 1e9, "skip_limit": 2, "loss_scale": fs.LossScale(4.0)}
    state = fs.init_state(plan, opt, params=params())
    grad = fs.value_and_grad(loss, plan, loss_scale=fs.LossScale(4.0))
    update = fs.make_update(opt, plan, **options)

    def fn(state: Any, x: Tensor) -> Any:
        _, grads = grad(state, x)
        return update(state, grads)

    steps = {"train": lambda: fs.make_train_step(loss, opt, plan, **options), "step": lambda: fs.make_step(fn, plan)}
    step = steps[way]()
    for _ in range(2):
        state, metrics = step(state, torch.full((4, 5), torch.nan))
        assert metrics.skipped
    with pytest.raises(fs.errors.NonFiniteError):
        step(state, torch.full((4, 5), torch.nan))
