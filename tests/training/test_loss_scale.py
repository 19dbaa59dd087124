"""float16: gradients that neither vanish nor overflow, a scale that adapts, and steps that are skipped on all ranks."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard import P, tree
from fshard.errors import NonFiniteError, PlanError
from fshard.optim.scaling import Scale, divisor
from fshard.state.entries import assemble, entries, scalars
from tests.shared.workers import Pools
from tests.training.test_precision import LR, batch, loss_fn, start

F16 = torch.float16
RULE = fs.LossScale(initial=2.0**22, interval=3)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run."""

    precision: fs.Precision = fs.Precision(F16, F16)
    spec: P = P(flat="shard")
    accumulate: int = 1
    compile: str | None = None
    donate: bool = True
    master: torch.dtype = torch.float32
    rule: fs.LossScale = RULE


CASES = {
    "both": Case(),
    "compute": Case(fs.Precision(F16), accumulate=2),
    "replicated": Case(spec=P()),
    "rows, graphs": Case(spec=P("shard"), compile="fx", donate=False),
}
STEPS = 10


def loud(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """A rank's rows. Those of rank 1 in step 5 have a gradient that float16 cannot hold at any scale in use."""
    x, y = batch(number, rank)
    return x, y * (3e5 if (number, rank) == (5, 1) else 1.0)


def trained(case: Case) -> dict[str, Any]:
    """On a rank: what came of training."""
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        params = tree.map(lambda x: x.to(case.master), start())
        plan = fs.make_plan(params, mesh, [(".*", case.spec)], units=("one", "two"), precision=case.precision)
        opt = fs.optim.sgd(LR, momentum=0.5)
        step = fs.make_train_step(
            loss_fn,
            opt,
            plan,
            accumulate=case.accumulate,
            debug=True,
            compile=case.compile,
            donate=case.donate,
            loss_scale=case.rule,
        )
        state = fs.init_state(plan, opt, params=params)
        out: dict[str, Any] = {"losses": [], "skipped": [], "scales": [], "steps": [], "kept": True, "norms": []}
        for number in range(STEPS):
            before = [e.tensor.clone() for e in entries(state)]
            kept = state
            state, metrics = step(state, loud(number, mesh.rank))
            out["losses"].append(float(metrics.loss))
            out["norms"].append(float(metrics.grad_norm))
            out["skipped"].append(metrics.skipped)
            out["scales"].append(state.scale)
            out["steps"].append(state.step)
            same = all(torch.equal(a, e.tensor) for a, e in zip(before, entries(state), strict=True))
            out["kept"] = out["kept"] and same == metrics.skipped and step.record == step.schedule.ops
            if not case.donate:
                out["kept"] = out["kept"] and all(map(torch.equal, before, [e.tensor for e in entries(kept)]))
        out["params"] = dict(tree.paths(fs.unshard(state.params, plan)))
        return out


def plain(case: Case, world: int) -> dict[str, Any]:
    """The same casts, scales and skips in one process."""
    kept = {path: leaf.clone() for path, leaf in tree.paths(start())}
    momentum: dict[str, Tensor] = {}
    scale = RULE.start()
    out: dict[str, Any] = {"losses": [], "skipped": [], "scales": [], "steps": []}
    for number in range(STEPS):
        sums = {path: torch.zeros_like(leaf) for path, leaf in kept.items()}
        values = []
        for rank in range(world):
            for part in range(case.accumulate):
                held = {path: leaf.to(F16).requires_grad_() for path, leaf in kept.items()}
                x, y = (t.chunk(case.accumulate)[part] for t in loud(number, rank))
                value = loss_fn(tree.nest(held), (x, y))
                grads = torch.autograd.grad(value, list(held.values()), torch.full_like(value, scale.value))
                values.append(value.item())
                for path, grad in zip(held, grads, strict=True):
                    sums[path] += grad.float()
        finite = all(bool(total.isfinite().all()) for total in sums.values())
        if finite:
            for path, total in sums.items():
                grad = total / (scale.value * world * case.accumulate)
                momentum[path] = 0.5 * momentum[path] + grad if path in momentum else grad
                kept[path] = kept[path] - LR * momentum[path]
        scale = RULE.after(scale, finite=finite)
        out["losses"].append(sum(values) / len(values))
        out["skipped"].append(not finite)
        out["scales"].append(scale)
        out["steps"].append(sum(not skipped for skipped in out["skipped"]))
    return out | {"params": kept}


@pytest.mark.sample(2)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_the_same_casts_in_one_process(pool: Pools, world: int, name: str) -> None:
    case = CASES[name]
    expected = plain(case, world)
    assert expected["skipped"][0] and expected["skipped"][5] and sum(expected["skipped"]) < 8
    assert max(s.value for s in expected["scales"][6:]) > expected["scales"][5].value  # it grew again
    for ours in pool(world).run(trained, case):
        assert ours["skipped"] == expected["skipped"] and ours["scales"] == expected["scales"]
        assert ours["steps"] == expected["steps"] and ours["kept"]
        assert [not math.isfinite(norm) for norm in ours["norms"]] == ours["skipped"]
        assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        for path, leaf in expected["params"].items():
            torch.testing.assert_close(ours["params"][path], leaf, rtol=1e-5, atol=1e-5)


def test_parameters_in_float16(pool: Pools) -> None:
    """Sums are float16 then, and every rank makes the same of them."""
    ran = pool(4).run(trained, Case(fs.Precision(), master=F16, rule=fs.LossScale(initial=2.0**12)))
    for ours in ran:
        assert ours["kept"] and ours["losses"] == ran[0]["losses"] and ours["losses"][4] < ours["losses"][0]
        assert ours["skipped"][5] and not all(ours["skipped"][1:5])


@given(st.integers(1, 1 << 20))
def test_division_before_and_behind_a_sum(parts: int) -> None:
    assert divisor(False, False, parts) == parts
    assert divisor(True, False, parts) == 1.0  # what is sent does not depend on how many there are
    before = divisor(True, True, parts)
    assert math.frexp(before)[0] == 0.5  # a power of two: nothing is rounded
    assert parts <= before**2 < 4 * parts


def test_what_is_sent_does_not_shrink_with_the_ranks() -> None:
    """A gradient of 2e-7 stays what it is among a thousand ranks; divided by them it would be zero."""
    one = torch.full((4,), 2e-7).half()
    assert (one / divisor(True, False, 1024)).eq(one).all() and not (one / 1024).any()


@pytest.mark.long
@pytest.mark.parametrize(
    ("master", "large", "tiny"), [(torch.float32, 60000.0, 2.0**-23), (F16, 2100.0, 2.0**-20)], ids=str
)
def test_gradients_neither_overflow_nor_vanish_among_many_ranks(master: torch.dtype, large: float, tiny: float) -> None:
    """Sums of 32 such gradients overflow float16, and a 32nd of a tiny one is zero."""
    mesh = fs.virtual_mesh((32,), ("shard",))
    assert not torch.tensor(32 * large).half().isfinite() and not torch.tensor(tiny / 32).half()

    def main() -> tuple[bool, list[float]]:
        params = {"large": torch.zeros(4, dtype=master), "tiny": torch.zeros(700, dtype=master)}
        plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("shard"))], precision=fs.Precision(F16, F16))
        opt = fs.optim.sgd(1.0)

        def loss(p: Any, x: Tensor) -> Tensor:
            return (p["large"].float() * x * large).sum() + (p["tiny"].float() * x * tiny).sum()

        step = fs.make_train_step(loss, opt, plan, loss_scale=fs.LossScale(initial=1.0))
        state, metrics = step(fs.init_state(plan, opt, params=params), torch.ones(()))
        whole = fs.unshard(state.params, plan)
        return metrics.skipped, [float(leaf.float().max()) for leaf in (-whole["large"], -whole["tiny"])]

    for skipped, (one, other) in mesh.run(main):
        assert not skipped and other == tiny and one == pytest.approx(large, rel=0.01 if master == F16 else 0)


def test_without_float16_nothing_changes() -> None:
    """A scale that is a power of two leaves every bit of a float32 run as it is."""
    ends = []
    for rule in (None, fs.LossScale(initial=1024.0)):
        with fs.make_mesh((-1,), ("shard",)) as mesh:
            plan = fs.make_plan(start(), mesh, [(".*", fs.fsdp("shard"))], units=("one", "two"))
            opt = fs.optim.sgd(LR)
            state = fs.init_state(plan, opt, params=start())
            step = fs.make_train_step(loss_fn, opt, plan, loss_scale=rule, clip_norm=0.5)
            for number in range(3):
                state, metrics = step(state, batch(number, 0))
            ends.append((metrics, [e.tensor for e in entries(state)]))
    assert all(map(torch.equal, ends[0][1], ends[1][1]))
    assert ends[0][0].grad_norm == ends[1][0].grad_norm and not ends[1][0].skipped


def _one(precision: fs.Precision, rule: fs.LossScale | None, poisoned: float) -> tuple[Any, Any, Any]:
    mesh = fs.make_mesh((-1,), ("shard",))
    plan = fs.make_plan(start(), mesh, [(".*", fs.fsdp("shard"))], units=("one", "two"), precision=precision)
    opt = fs.optim.adamw(0.1)
    x, y = batch(0, 0)
    step = fs.make_train_step(loss_fn, opt, plan, loss_scale=rule)
    return step, fs.init_state(plan, opt, params=start()), (x, y * poisoned)


def test_other_values_that_are_not_finite_stay_errors() -> None:
    step, state, rows = _one(fs.Precision(F16), fs.LossScale(), math.nan)
    with pytest.raises(NonFiniteError, match="the loss nan"):
        step(state, rows)
    step, state, rows = _one(fs.Precision(F16), fs.LossScale(initial=4.0, backoff=0.5, least=2.0), 3e6)
    state, metrics = step(state, rows)
    assert metrics.skipped and state.scale == Scale(2.0)
    with pytest.raises(NonFiniteError, match="the gradient norm is"):
        step(state, rows)
    assert state.step == 0 and state.scale == Scale(2.0)


def test_the_scale_is_part_of_the_state() -> None:
    step, state, rows = _one(fs.Precision(F16), fs.LossScale(initial=64.0, interval=5), 1.0)
    assert state.scale is None and "loss_scale" not in scalars(state)
    state, _ = step(state, rows)
    assert scalars(state) == {"step": 1, "seed": 0, "loss_scale": 64.0, "loss_scale_good": 1}
    values = {e.name: e.tensor for e in entries(state)}

    def fill(entry: Any) -> None:
        entry.tensor.copy_(values[entry.name])

    again = assemble(step.plan, step.opt, fill, scalars(state))
    assert again.scale == state.scale == Scale(64.0, 1)
    assert fs.reshard_state(state, step.plan.replace(), step.opt).scale == state.scale


def test_float16_without_a_scaler_is_a_warning() -> None:
    plan = fs.make_plan(start(), fs.abstract_mesh((2,), ("s",)), [(".*", fs.fsdp("s"))], precision=fs.Precision(F16))
    with pytest.warns(UserWarning, match=r"float16, in which(.|\n)*loss_scale=fs\.LossScale\(\)\), or use bfloat16"):
        fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan, loss_scale=fs.LossScale())
        fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan.replace(precision=fs.Precision(torch.bfloat16)))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"loss_scale": 1024.0}, r"loss_scale=1024.0 must be fs\.LossScale"),
        (
            {"loss_scale": fs.LossScale(), "schedule": fs.Policy(update="in_backward")},
            "update='in_backward' never does",
        ),
    ],
)
def test_scales_that_a_step_cannot_have(arguments: dict[str, Any], error: str) -> None:
    plan = fs.make_plan(start(), fs.abstract_mesh((2,), ("s",)), [(".*", fs.fsdp("s"))])
    with pytest.raises(PlanError, match=error):
        fs.make_train_step(loss_fn, fs.optim.sgd(LR), plan, **arguments)


@pytest.mark.parametrize(
    "wrong", [{"initial": 0}, {"growth": 0.5}, {"backoff": 1}, {"interval": 0}, {"least": -1}, {"least": 2.0**17}]
)
def test_scales_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        fs.LossScale(**wrong)
