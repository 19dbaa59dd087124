"""The optimizers against those of ``torch.optim`` in their plain form: one tensor at a time, not fused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fshard.optim import adamw, rate, sgd
from fshard.optim.schedules import warmup_cosine

SIZES = [0, 1, 17, 4096]
SCHEDULE = warmup_cosine(0.1, warmup=3, total=9, floor=0.001)
STEPS = 10
WEIGHT_DECAY = 0.1


def train(
    ours: adamw | sgd, theirs: type[torch.optim.AdamW] | type[torch.optim.SGD], dtype: torch.dtype, **options: Any
) -> None:
    """Take some steps with both, decaying every second tensor, and compare parameters and states."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    hypers = [ours.hyper(f"{i}.{'weight' if i % 2 else 'bias'}", (len(p),)) for i, p in enumerate(params)]
    assert hypers == [0.0, WEIGHT_DECAY] * 2
    states = [ours.init(p) for p in params]
    groups = [{"params": [twin], "weight_decay": decay} for twin, decay in zip(twins, hypers, strict=True)]
    reference = theirs(groups, lr=1.0, foreach=False, **options)
    for step in range(1, STEPS + 1):
        grads = [torch.randn(n, generator=generator).to(dtype) for n in SIZES]
        for twin, group, grad in zip(twins, reference.param_groups, grads, strict=True):
            twin.grad = grad.clone()
            group["lr"] = rate(ours.lr, step)
        reference.step()
        for decay in (0.0, WEIGHT_DECAY):
            chosen = [i for i, hyper in enumerate(hypers) if hyper == decay]
            arguments = ([of[i] for i in chosen] for of in (params, grads, states))
            ours.update(*arguments, step=step, hyper=decay)  # type: ignore[arg-type]
    for param, state, twin in zip(params, states, twins, strict=True):
        close(param, twin.detach())
        for name, value in state.items():
            close(value, reference.state[twin][name])


def close(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of some steps: a few units in the last place of the largest number."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=20 * eps, atol=20 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lr", [0.01, SCHEDULE], ids=repr)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)], ids=repr)
def test_adamw(lr: Any, betas: tuple[float, float], dtype: torch.dtype) -> None:
    ours = adamw(lr, betas=betas, eps=1e-6, weight_decay=WEIGHT_DECAY, decay=".*weight")
    train(ours, torch.optim.AdamW, dtype, betas=betas, eps=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lr", [0.01, SCHEDULE], ids=repr)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 1.0},
    ],
    ids=str,
)
def test_sgd(lr: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    ours = sgd(lr, weight_decay=WEIGHT_DECAY, decay=".*weight", **options)
    train(ours, torch.optim.SGD, dtype, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 35, 64])
def test_adamw_in_half_precision_rounds_once(dtype: torch.dtype, size: int) -> None:
    # torch's plain AdamW rounds every intermediate to half precision: the definition is the better judge.
    generator = torch.Generator().manual_seed(0)
    param, grad, exp_avg, exp_avg_sq = (torch.randn(size, generator=generator).to(dtype) for _ in range(4))
    exp_avg_sq.abs_()
    p, g, m, v = (t.double() for t in (param, grad, exp_avg, exp_avg_sq))
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    p = p * (1 - 0.1 * 0.1) - 0.1 * (m / (1 - 0.9**3)) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    adamw(0.1, betas=(0.9, 0.95)).update([param], [grad], [state], step=3, hyper=0.1)
    eps = torch.finfo(dtype).eps
    for value, exact in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
        torch.testing.assert_close(value.double(), exact, rtol=2 * eps, atol=2 * eps)


def test_the_bias_correction_is_right_late_in_a_run() -> None:
    for step in (1, 10_000, 2_000_000):
        param, grad = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        state = {"exp_avg": torch.ones_like(param), "exp_avg_sq": torch.ones_like(param)}
        adamw(1.0, betas=(0.9, 0.999), eps=1e-12).update([param], [grad], [state], step=step, hyper=0.0)
        expected = -(1 / (1 - 0.9**step)) / math.sqrt(1 / (1 - 0.999**step))
        assert param.item() == pytest.approx(expected, rel=1e-6)
