"""Models in float64 train in float64: no number of a step passes through a narrower dtype."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import optim as O  # noqa: N812
from fshard import tree
from tests.optim.test_carried import CUTS, ROWS, global_batch, loss_of, params
from tests.shared.plain import difference

OPTS: dict[str, tuple[Callable[[], Any], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (lambda: O.sgd(0.1, momentum=0.9), lambda leaves: torch.optim.SGD(leaves, 0.1, 0.9)),
    "adamw": (lambda: O.adamw(0.02, weight_decay=0.1), lambda ls: torch.optim.AdamW(ls, 0.02, weight_decay=0.1)),
    "adafactor": (lambda: O.adafactor(0.05), lambda leaves: torch.optim.Adafactor(leaves, lr=0.05)),
    "NAdam": (lambda: O.from_torch(torch.optim.NAdam, lr=0.01), lambda leaves: torch.optim.NAdam(leaves, 0.01)),
}
PLAN = ({"shard": 3}, {"replica": 2, "shard": 2})
STEPS, CLIP = 8, 0.3


def trained(
    name: str, axes: dict[str, int], mean: bool, **options: Any
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """On a played rank: parameters after some steps, losses and norms as they were told."""
    with fs.make_mesh(tuple(axes.values()), tuple(axes)) as mesh:
        spec = fs.P(mesh.axis_names if len(axes) > 1 else "shard")
        rules = [(r".*bias", fs.P()), fs.Rule(r".*", fs.fsdp("shard"), align="leaf")]
        plan = fs.make_plan(tree.nest(params()), mesh, rules, batch=spec)
        opt = OPTS[name][0]()
        state = fs.init_state(plan, opt, params=tree.nest(params()))
        step = fs.make_train_step(loss_of(mean), opt, plan, clip_norm=CLIP, **options)
        losses, norms = [], []
        for _ in range(STEPS):
            rows = CUTS[mesh.size] if mean else (ROWS // mesh.size,) * mesh.size
            state, metrics = step(state, global_batch(state.step).split(rows)[mesh.rank])
            assert metrics.loss.dtype == metrics.grad_norm.dtype == torch.float64
            losses.append(metrics.loss.item())
            norms.append(metrics.grad_norm.item())
        return dict(tree.paths(fs.unshard(state.params, plan))), losses, norms


def plain(name: str, mean: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """The same by torch.optim and torch's clipping."""
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in params().items()}
    rule, losses, norms = OPTS[name][1](list(leaves.values())), [], []
    for number in range(STEPS):
        rule.zero_grad()
        found = loss_of(mean)(tree.nest(leaves), global_batch(number))
        loss = found.value if mean else found
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(leaves.values(), CLIP).item())
        rule.step()
        losses.append(loss.item())
    return {path: leaf.detach() for path, leaf in leaves.items()}, losses, norms


@pytest.mark.sample(3)
@pytest.mark.long
@pytest.mark.parametrize("name", list(OPTS))
@pytest.mark.parametrize("kind", ["plain mean", "Mean", "scaled", "early"])
def test_training_in_float64_is_that_of_one_process_to_twelve_digits(name: str, kind: str) -> None:
    mean, axes = kind != "plain mean", PLAN[len(kind) % 2]
    options: dict[str, Any] = {"accumulate": 2 if kind == "Mean" else 1}
    if kind == "scaled":
        options["loss_scale"] = fs.LossScale(
            initial=3.0, growth=1.7, interval=2
        )  # no powers of two, which hide rounding
    if kind == "early":
        options["donate"] = False
    ranks = fs.virtual_mesh((4 if len(axes) > 1 else 3,), ("any",))
    got = ranks.run(trained, name, axes, mean, **options)[0]
    want = plain(name, mean)
    assert difference(got[0], want[0]) < 1e-12
    assert got[1] == pytest.approx(want[1], rel=1e-13) and got[2] == pytest.approx(want[2], rel=1e-12)


def test_parameters_in_float64_are_not_rounded_by_eight_bit_moments() -> None:
    opt, leaf = O.adamw8bit(0.01), torch.randn(700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, state = leaf.clone(), opt.init(leaf)
    opt.update([leaf], [torch.zeros_like(leaf)], [state], step=1, hyper=0.0)
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_have_the_dtype_of_what_they_tell_of(dtype: torch.dtype) -> None:
    with fs.make_mesh((1,), ("shard",)) as mesh:
        plan = fs.make_plan({"w": torch.ones(3, dtype=dtype)}, mesh, [(r".*", fs.fsdp("shard"))])
        opt = O.sgd(0.0)
        state = fs.init_state(plan, opt, params={"w": torch.ones(3, dtype=dtype)})

        def loss_fn(p: Any, x: Tensor) -> Any:
            loss = (p["w"] * x).sum()
            return loss, {"mean": fs.Mean(loss.detach() / 3, 3)}

        x = torch.full((1, 3), 0.1, dtype=dtype)
        state, metrics = fs.make_train_step(loss_fn, opt, plan)(state, x)
        exact = (torch.ones(3, dtype=dtype) * x).sum()
        assert metrics.loss.dtype == metrics.aux["mean"].dtype == metrics.grad_norm.dtype == dtype
        assert torch.equal(metrics.loss, exact)
        found = fs.make_eval_step(loss_fn, plan)(state, x)[0]
        assert found.dtype == dtype and torch.equal(found, exact)


def test_losses_beyond_what_float32_holds() -> None:
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (p["w"].double() * x).sum() * 1e100

    for dtype in (torch.float32, torch.float64):
        with fs.make_mesh((1,), ("shard",)) as mesh:
            start = {"w": torch.ones(3, dtype=torch.float64)}
            plan = fs.make_plan(start, mesh, [(r".*", fs.fsdp("shard"))])
            state = fs.init_state(plan, O.sgd(0.0), params=start)
            fn = loss_fn if dtype == torch.float64 else lambda p, x: (p["w"] * 1e30 * x).sum().float()
            step = fs.make_train_step(fn, O.sgd(0.0), plan, clip_norm=1.0)
            state, metrics = step(
                state, torch.full((1, 3), 1e10 if dtype == torch.float64 else 0.1, dtype=torch.float64)
            )
            assert metrics.loss.dtype == dtype and metrics.loss.isfinite()
            assert metrics.grad_norm.dtype == torch.float64 and metrics.grad_norm > 1e29
