"""Optimizers as people write them: elementwise rules in place run, others are refused where they are given."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs


class Plain:
    """Gradient descent with momentum, in place."""

    lr = 0.1

    def init(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"momentum": torch.zeros_like(param)}

    def hyper(self, path: str, shape: tuple[int, ...]) -> float:
        return 0.0

    def update(self, params: Any, grads: Any, states: Any, *, step: int, hyper: Any, **more: Any) -> Any:
        for param, grad, state in zip(params, grads, states, strict=True):
            self.rule(param, grad, state["momentum"], step)

    def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
        param.sub_(momentum.mul_(0.9).add_(grad), alpha=self.lr)


class Lars(Plain):
    def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
        param.sub_(grad / (grad.norm() + 1e-6), alpha=self.lr)


class Centralized(Plain):
    def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
        param.sub_(grad - grad.mean(), alpha=self.lr)


class Counts(Plain):
    def __init__(self) -> None:
        self.calls = 0

    def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
        self.calls += 1
        param.sub_(grad, alpha=self.lr / self.calls)


class Returns(Plain):
    def update(self, params: Any, grads: Any, states: Any, *, step: int, hyper: Any, **more: Any) -> Any:
        return [param - self.lr * grad for param, grad in zip(params, grads, strict=True)]


class NotInPlace(Plain):
    def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
        param = param - self.lr * grad


class InitTakesMore(Plain):
    def init(self, param: torch.Tensor, hyper: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {}


def plan() -> tuple[fs.Plan, Any]:
    model = fs.split(nn.Linear(3, 2))
    mesh = fs.abstract_mesh((2,), ("data",))
    return fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data")), model


def given(opt: Any) -> None:
    made, model = plan()
    fs.make_train_step(lambda params, batch: model.apply(params, batch).square().mean(), opt, made)


@pytest.mark.parametrize("around", [lambda opt: opt, lambda opt: fs.optim.partition([("weight", opt), (".*", opt)])])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Lars, "the optimizer Lars depends on how a leaf is cut"),
        (Centralized, "the optimizer Centralized depends on how a leaf is cut"),
        (Counts, "the optimizer Counts depends on how a leaf is cut"),
        (Returns, "update of the optimizer Returns returned list: it must write the new values in place"),
        (InitTakesMore, r"the optimizer InitTakesMore failed on a vector.*write init\(self, param\)"),
    ],
)
def test_rules_that_slices_would_change_are_refused(kind: Any, words: str, around: Any) -> None:
    with pytest.raises(fs.errors.PlanError, match=words):
        given(around(kind()))


def test_a_rule_that_changes_nothing_is_told() -> None:
    with pytest.warns(UserWarning, match="changes no parameter in 3 updates: its update must write in place"):
        given(NotInPlace())


def test_elementwise_rules_run() -> None:
    made, model = plan()
    before = torch.get_rng_state()
    fs.init_state(made, Plain(), params=model.params)
    assert torch.equal(before, torch.get_rng_state())


def test_a_rule_of_rate_zero_is_not_blamed() -> None:
    opt = NotInPlace()
    opt.lr = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given(opt)


def test_a_rule_for_another_device_is_not_tried_where_a_process_only_plans() -> None:
    class Elsewhere(Plain):
        def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
            raise RuntimeError("this kernel runs on another device")

    model = fs.split(nn.Linear(3, 2))
    for device, tried in (("cuda", torch.cuda.is_available()), ("cpu", True)):
        mesh = fs.abstract_mesh((2,), ("data",), device=device)
        made = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        with pytest.raises(fs.errors.PlanError, match="runs on another device") if tried else contextlib.nullcontext():
            fs.make_train_step(lambda params, x: model.apply(params, x).sum(), Elsewhere(), made)


def test_a_rule_that_draws_is_taken_and_leaves_the_generator_alone() -> None:
    class Noisy(Plain):
        def rule(self, param: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor, step: int) -> Any:
            param.sub_(grad + torch.randn(grad.shape), alpha=self.lr)

    made, model = plan()
    before = torch.get_rng_state()
    fs.init_state(made, Noisy(), params=model.params)
    assert torch.equal(before, torch.get_rng_state())


AROUND = {
    "alone": lambda opt: opt,
    "partition": lambda opt: fs.optim.partition([("weight", opt), (".*", opt)]),
    "chain": lambda opt: fs.optim.chain(fs.optim.scale(2.0), opt),
    "ema": lambda opt: fs.optim.ema(opt, 0.9),
    "every": lambda opt: fs.optim.every(2, opt),
    "every ema": lambda opt: fs.optim.every(2, fs.optim.ema(opt, 0.9)),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_rule_that_knows_no_scale_is_given_gradients_that_are_divided(around: Any, clip: float | None) -> None:
    """Clipping, and the mean over several steps, are in the scale."""
    model = fs.split(nn.Linear(3, 2))
    made = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    ends = []
    for opt in (around(Plain()), around(fs.optim.sgd(0.1, momentum=0.9))):
        state = fs.init_state(made, opt, params=model.params)
        step = fs.make_train_step(lambda p, x: model.apply(p, x).square().sum(), opt, made, clip_norm=clip)
        for number in range(1, 5):
            state, _ = step(state, torch.full((2, 3), float(number)))
        ends.append(fs.unshard(state.params, made))
    torch.testing.assert_close(*ends)
