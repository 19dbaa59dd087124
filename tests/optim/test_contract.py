"""What every optimizer has to do, whatever its rule: one suite, run on each of them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard.errors import PlanError
from fshard.optim import Optimizer, State, adafactor, adamw, adamw8bit, lion, matrices, sgd
from fshard.optim.contract import contract
from fshard.optim.schedules import linear, warmup_cosine

SCHEDULE = warmup_cosine(0.1, warmup=2, total=8, floor=0.01)
OPTIMIZERS = [
    adamw(0.05),
    adamw(SCHEDULE, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, decay=r".*weight"),
    sgd(0.05),
    sgd(SCHEDULE, momentum=0.9, weight_decay=0.1),
    sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    sgd(0.05, momentum=0.9, dampening=0.5),
    lion(0.05, weight_decay=0.1),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
every_optimizer = pytest.mark.parametrize("opt", OPTIMIZERS, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)


def draw(seed: int, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Flat tensors of normal numbers, a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


def run(
    opt: Optimizer, params: list[Tensor], states: list[State] | None = None, first: int = 1, last: int = 5
) -> tuple[list[Tensor], list[State]]:
    """Clones of the params and states after some updates whose gradients are a function of the step alone."""
    params = [p.clone() for p in params]
    states = [opt.init(p) for p in params] if states is None else [copy(s) for s in states]
    for step in range(first, last + 1):
        grads = [g.to(params[0].device) for g in draw(step, *map(len, params), dtype=params[0].dtype)]
        opt.update(params, grads, states, step=step, hyper=0.1)
    return params, states


def copy(state: State) -> State:
    """The state in memory of its own."""
    return {name: value.clone() for name, value in state.items()}


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether two lists of tensors are bitwise equal."""
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def flat(states: list[State]) -> list[Tensor]:
    """All buffers of some states."""
    return [value for state in states for value in state.values()]


@every_optimizer
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_state_has_fresh_buffers_like_the_shard(opt: Optimizer, device: str) -> None:
    param = torch.ones(7, dtype=torch.float64, device=device)
    first, second = opt.init(param), opt.init(param)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert (value.shape, value.dtype, value.device) == (param.shape, param.dtype, param.device)
        assert not value.requires_grad
        assert value is not second[name]
        assert device == "meta" or not value.any()


@every_optimizer
@every_device
def test_values_change_where_they_lie(opt: Optimizer, device: str) -> None:
    params = [p.to(device) for p in draw(0, 17, 4)]
    grads = [g.to(device) for g in draw(1, 17, 4)]
    before = [p.clone() for p in params]
    states = [opt.init(p) for p in params]
    where = [t.data_ptr() for t in params + flat(states)]
    opt.update(params, grads, states, step=1, hyper=0.0)
    assert [t.data_ptr() for t in params + flat(states)] == where
    assert not any((p == b).any() for p, b in zip(params, before, strict=True))
    assert all(t.any() for t in flat(states))


@every_optimizer
@every_dtype
@every_device
def test_equal_inputs_give_equal_results(opt: Optimizer, dtype: torch.dtype, device: str) -> None:
    params = [p.to(device) for p in draw(0, 17, 100, dtype=dtype)]
    (p1, s1), (p2, s2) = run(opt, params), run(opt, params)
    assert same(p1 + flat(s1), p2 + flat(s2))


@every_optimizer
@every_dtype
def test_a_saved_state_resumes_exactly(opt: Optimizer, dtype: torch.dtype) -> None:
    params = draw(0, 33, 5, dtype=dtype)
    whole = run(opt, params, last=6)
    again = dataclasses.replace(opt)  # type: ignore[type-var]
    resumed = run(again, *run(opt, params, last=3), first=4, last=6)
    assert same(whole[0] + flat(whole[1]), resumed[0] + flat(resumed[1]))


@every_optimizer
@every_dtype
@pytest.mark.parametrize("cut", [0, 1, 16, 50, 99, 100])
def test_a_shard_may_be_updated_in_pieces(opt: Optimizer, dtype: torch.dtype, cut: int) -> None:
    (param,), grads = draw(0, 100, dtype=dtype), draw(1, 100, dtype=dtype)
    whole, pieces = param.clone(), param.clone()
    state, other = opt.init(whole), opt.init(pieces)
    for step in range(1, 4):
        opt.update([whole], [grads[0].clone()], [state], step=step, hyper=0.1)
        cuts = slice(0, cut), slice(cut, 100)
        views = [{k: v[c] for k, v in other.items()} for c in cuts]
        opt.update([pieces[c] for c in cuts], [grads[0][c] for c in cuts], views, step=step, hyper=0.1)
    for a, b in zip([whole, *state.values()], [pieces, *other.values()], strict=True):
        torch.testing.assert_close(a, b)  # the kernels' last bit depends on where SIMD vectors end


@every_optimizer
@every_dtype
@every_device
def test_nothing_changes_at_found_inf(opt: Optimizer, dtype: torch.dtype, device: str) -> None:
    params, states = run(opt, [p.to(device) for p in draw(0, 17, 40, dtype=dtype)], last=2)
    before = [t.clone() for t in params + flat(states)]
    bad = [torch.full_like(p, float("nan")) for p in params]
    one, two = (torch.full((), value, device=device) for value in (1.0, 2.0))
    for step in (1, 3):
        opt.update(params, bad, states, step=step, hyper=0.1, grad_scale=two, found_inf=one)
        assert same(params + flat(states), before)


@every_optimizer
@every_dtype
@every_device
def test_found_inf_of_zero_is_none(opt: Optimizer, dtype: torch.dtype, device: str) -> None:
    results = []
    for found_inf in (None, torch.zeros((), device=device)):
        params, states = run(opt, [p.to(device) for p in draw(0, 17, 40, dtype=dtype)], last=2)
        grads = [g.to(device) for g in draw(9, 17, 40, dtype=dtype)]
        opt.update(params, grads, states, step=3, hyper=0.1, found_inf=found_inf)
        results.append(params + flat(states))
    assert same(*results)


@every_optimizer
@every_dtype
@every_device
@pytest.mark.parametrize("shape", [(), (1,)])
def test_gradients_are_divided_by_the_scale(
    opt: Optimizer, dtype: torch.dtype, device: str, shape: tuple[int, ...]
) -> None:
    scale = torch.full(shape, 4.0, device=device)  # a power of two: exact in every dtype
    results = []
    for divide in (False, True):
        params, states = run(opt, [p.to(device) for p in draw(0, 17, 40, dtype=dtype)], last=2)
        grads = [g.to(device) for g in draw(9, 17, 40, dtype=dtype)]
        grads = [g / 4 for g in grads] if divide else grads
        opt.update(params, grads, states, step=3, hyper=0.1, grad_scale=None if divide else scale)
        results.append(params + flat(states))
    if device == "cuda" and dtype == torch.float32 and isinstance(opt, sgd) and opt.momentum:
        # Its kernel has other bits of parameters with a scale than without one: half a unit in the last place of the
        # update, which is below 1 here, and one of the parameter.
        (scaled, plain), eps, count = results, torch.finfo(dtype).eps, len(params)
        torch.testing.assert_close(scaled[:count], plain[:count], rtol=eps, atol=eps / 4)
        results = [scaled[count:], plain[count:]]
    assert same(*results)


@every_optimizer
@every_dtype
@every_device
def test_empty_slices_and_no_slices(opt: Optimizer, dtype: torch.dtype, device: str) -> None:
    opt.update([], [], [], step=1, hyper=0.0)
    params = [p.to(device) for p in draw(0, 0, 5, 0, dtype=dtype)]
    alone = run(opt, params[:1], last=1)
    assert alone[0][0].shape == (0,)
    among, _ = run(opt, params, last=1)
    assert [len(p) for p in among] == [0, 5, 0]
    assert not torch.equal(among[1], params[1])


@every_optimizer
@every_dtype
def test_zero_padding_stays_zero(opt: Optimizer, dtype: torch.dtype) -> None:
    param = torch.zeros(21, dtype=dtype)
    state = opt.init(param)
    for step in range(1, 4):
        opt.update([param], [torch.zeros_like(param)], [state], step=step, hyper=0.5)
    assert not param.any()
    assert not any(value.any() for value in state.values())


@every_optimizer
def test_an_optimizer_is_a_value(opt: Optimizer) -> None:
    assert dataclasses.replace(opt) == opt  # type: ignore[type-var]
    assert hash(dataclasses.replace(opt)) == hash(opt)  # type: ignore[type-var]
    assert eval(repr(opt), {**vars(fs.optim), **vars(fs.optim.schedules)}) == opt
    with pytest.raises(dataclasses.FrozenInstanceError):
        opt.lr = 1.0  # type: ignore[misc]


MAKERS: list[Callable[..., Optimizer]] = [adamw, lion, sgd]
every_maker = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)


@every_maker
def test_decay_picks_leaves(make: Callable[..., Optimizer]) -> None:
    leaves = {"a.weight": (3, 4), "a.bias": (3,), "norm.weight": (4,)}

    def decaying(opt: Optimizer) -> list[str]:
        assert {opt.hyper(path, shape) for path, shape in leaves.items()} <= {0.0, 0.1}
        return [path for path, shape in leaves.items() if opt.hyper(path, shape)]

    assert decaying(make(0.1, weight_decay=0.1)) == list(leaves)
    assert decaying(make(0.1, weight_decay=0.1, decay=matrices)) == ["a.weight"]
    assert decaying(make(0.1, weight_decay=0.1, decay=r".*\.weight")) == ["a.weight", "norm.weight"]
    assert decaying(make(0.1, weight_decay=0.1, decay="weight")) == []  # the whole path has to match
    assert decaying(make(0.1, weight_decay=0.1, decay=lambda path, shape: path == "a.bias")) == ["a.bias"]
    assert decaying(make(0.1, weight_decay=0.0)) == []


@every_maker
def test_a_schedule_is_asked_for_the_step_from_zero(make: Callable[..., Optimizer]) -> None:
    asked: list[int] = []

    def lr(step: int) -> float:
        asked.append(step)
        return 0.1

    run(make(lr), draw(0, 3), last=4)
    assert asked == [0, 1, 2, 3]


@every_maker
def test_a_rate_of_zero_changes_no_parameter(make: Callable[..., Optimizer]) -> None:
    params = draw(0, 20)
    assert same(run(make(linear(0.0, 0.0, steps=1)), params)[0], params)


@every_maker
@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf"), None, torch.tensor(0.1)])
def test_a_bad_rate_is_an_error_before_anything_changes(make: Callable[..., Optimizer], rate: object) -> None:
    opt = make(lambda step: 0.1 if step < 2 else rate)
    params, states = run(opt, draw(0, 20), last=2)
    before = [t.clone() for t in params + flat(states)]
    with pytest.raises(PlanError, match=r"learning rate of update 3 is .*here 2\."):
        opt.update(params, draw(1, 20), states, step=3, hyper=0.0)
    assert same(params + flat(states), before)


@every_maker
def test_updates_count_from_one(make: Callable[..., Optimizer]) -> None:
    params = draw(0, 3)
    opt = make(0.1)
    with pytest.raises(PlanError, match="step = 0: updates count from 1"):
        opt.update(params, draw(1, 3), [opt.init(params[0])], step=0, hyper=0.0)


class Quiet:
    """An optimizer that asks another one for everything, by attribute, and has a ``steps`` of its own meaning."""

    steps = 5

    def __init__(self, opt: Any) -> None:
        self.opt = opt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.opt, name)


@pytest.mark.parametrize("opt", [sgd(0.1, momentum=0.9), adamw8bit(0.1, block=64), adafactor(0.1)], ids=repr)
def test_what_has_the_methods_is_an_optimizer(opt: Any) -> None:
    weight = torch.linspace(-1, 1, 128).view(16, 8)
    plan = fs.make_plan({"w": weight}, fs.make_mesh((1,), ("shard",)), [(".*", fs.P())])

    def loss(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).square().mean()

    found = []
    for rule in (opt, Quiet(opt)):
        state = fs.init_state(plan, rule, params={"w": weight})
        step = fs.make_train_step(loss, rule, plan)
        for number in range(3):
            state, _ = step(state, torch.tensor(float(number + 1)))
        found.append([state.params["w"], *(leaf for _, leaf in fs.tree.paths(state.opt_state))])
    assert same(*found) and len(found[0]) > 1
    made = contract(Quiet(opt))
    assert (made.steps, made.grain(opt.hyper("w", (16, 8)))) == (None, contract(opt).grain(opt.hyper("w", (16, 8))))
