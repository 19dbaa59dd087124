"""Casts around units: inputs, outputs, and buffers, which are never cast unless that is asked for; and evaluation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from tests.shared.workers import Pools
from tests.training import leaf_rows

BF16, F32 = torch.bfloat16, torch.float32


class Seen(list[Any]):
    """A list that copies of a module share."""

    def __deepcopy__(self, memo: Any) -> "Seen":
        return self


class Normed(nn.Module):
    """A layer with running statistics, which writes down what it saw."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.seen = seen

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        assert self.norm.running_mean is not None
        self.seen.append((x.dtype, self.linear.weight.dtype, self.norm.running_mean.dtype, ids.dtype))
        return self.norm(self.linear(x)), ids


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (fs.Precision(), (F32, F32, F32, F32, F32)),
        (fs.Precision(inputs=True), (F32, F32, F32, F32, F32)),
        (fs.Precision(BF16, inputs=True), (BF16, BF16, F32, BF16, F32)),
        (fs.Precision(BF16, inputs=True, output=F32), (BF16, BF16, F32, F32, F32)),
        (fs.Precision(BF16, output=F32, inputs=True, buffers=BF16), (BF16, BF16, BF16, F32, F32)),
    ],
)
def test_dtypes_around_a_unit(precision: fs.Precision, expected: tuple[torch.dtype, ...]) -> None:
    """What a unit sees of its input, weight and buffer; what leaves it; and the buffers that come back."""
    seen = Seen()
    torch.manual_seed(0)
    model = fs.split(Outer(seen), units=("a",))
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        # torch's kernel takes weights and statistics of one dtype.
        rules: list[Any] = [fs.Rule(r".*norm.*", fs.fsdp("shard"), precision=fs.Precision())]
        rules = [*(rules if precision.buffers is None else ()), (".*", fs.fsdp("shard"))]
        plan = fs.make_plan(model, mesh, rules, precision=precision)
        opt = fs.optim.sgd(0.1)

        def loss_fn(params: Any, batch: Any) -> Any:
            (y, ids), new = model.apply(params, *batch, buffers=model.buffers)
            return y.float().square().mean(), {"y": y, "ids": ids, "buffers": new}

        step = fs.make_train_step(loss_fn, opt, plan, debug=True)
        _, metrics = step(fs.init_state(plan, opt, params=model.params), (torch.randn(8, 4), torch.arange(8)))
    new = dict(tree.paths(metrics.aux["buffers"]))
    assert seen[-1] == (*expected[:3], torch.int64)
    assert metrics.aux["y"].dtype == expected[3] and metrics.aux["ids"].dtype == torch.int64
    assert new["a.norm.running_mean"].dtype == expected[4] and new["a.norm.num_batches_tracked"] == 1
    assert new["a.norm.running_mean"].abs().max() > 0


class Outer(nn.Module):
    """Code around the unit."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.a = Normed(seen)

    def forward(self, x: Tensor, ids: Tensor) -> Any:
        return self.a(x, ids)


def test_outside_of_a_step_nothing_is_cast() -> None:
    seen = Seen()
    model = fs.split(Outer(seen).eval(), units=("a",))
    model.apply(model.params, torch.randn(2, 4), torch.arange(2))
    assert seen[-1][0] == F32


def evaluated() -> list[float]:
    """On a rank: a loss as the plan says, in full precision, and in bfloat16 though the plan says float32."""
    model = fs.split(leaf_rows.module(), units=("blocks.*",))
    out = []
    with fs.make_mesh((-1,), ("shard",)) as mesh:
        rows = leaf_rows.part(0, mesh.rank, mesh.size)
        for kept, read in ((leaf_rows.BF16, None), (leaf_rows.BF16, fs.Precision()), (fs.Precision(), leaf_rows.BF16)):
            rules = [fs.Rule(leaf_rows.NORMS, fs.P()), leaf_rows.SHARDED]
            plan = fs.make_plan(model, mesh, rules, precision=kept)
            opt = fs.optim.sgd(0.1)
            step = fs.make_train_step(leaf_rows.loss_fn(model), opt, plan, debug=True)
            evaluate = fs.make_eval_step(leaf_rows.loss_fn(model), plan, precision=read, debug=True)
            state = fs.init_state(plan, opt, params=model.params)
            out.append(float(evaluate(state, rows)))
            assert evaluate.record == evaluate.schedule.ops
            state, _ = step(state, rows)
            assert out[-1] != float(evaluate(state, rows))
    return out


def test_evaluation_in_another_precision(pool: Pools) -> None:
    exact, cast = (leaf_rows.plain(leaf_rows.Row(precision=p), 2)[0][0] for p in (fs.Precision(), leaf_rows.BF16))
    assert abs(exact - cast) > 1e-5
    for losses in pool(2).run(evaluated):
        assert losses == pytest.approx([cast, exact, cast], rel=1e-6)


@pytest.mark.parametrize(
    "wrong", [{"output": torch.int32}, {"buffers": "bfloat16"}, {"inputs": torch.bfloat16}, {"reduce": torch.uint8}]
)
def test_casts_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=rf"fs\.Precision\({next(iter(wrong))}="):
        fs.Precision(**wrong)


def test_something_else_for_a_precision_of_evaluation() -> None:
    plan = fs.make_plan({"w": torch.ones(4)}, fs.abstract_mesh((2,), ("s",)), [(".*", fs.fsdp("s"))])
    with pytest.raises(PlanError, match=r"precision.*fs\.Precision\(\.\.\.\) or None"):
        fs.make_eval_step(lambda p, b: p, plan, precision=torch.float32)  # type: ignore[arg-type]
