"""Warnings and errors that name a way out: the way out works, without another warning."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.errors import BatchError, TreeError, UnitError

OPT = fs.optim.sgd(0.1)
W = {"w": torch.ones(2)}


def trained(loss: Any, *batches: Any, accumulate: int = 1, ranks: int = 2) -> Tensor:
    plan = fs.make_plan(W, fs.virtual_mesh((ranks,), ("data",)), [("w", fs.fsdp("data"))], batch=fs.P("data"))
    state = fs.init_state(plan, OPT, params=W)
    step = fs.make_train_step(loss, OPT, plan, accumulate=accumulate)
    for batch in batches:
        state, _ = step(state, batch)
    found: Tensor = state.params["w"]
    return found


INSIDE, EDGE = torch.arange(16.0).view(8, 2) / 16, torch.arange(8.0).view(4, 2)


def points(p: Any, inside: Tensor, edge: Tensor) -> Tensor:
    return (inside * p["w"]).square().mean() + (edge @ p["w"]).mean()


def test_rows_of_two_sets() -> None:
    def plain(p: Any, b: Any) -> Tensor:
        return points(p, b["inside"], b["edge"])

    def marked(p: Any, b: Any) -> Tensor:
        return points(p, b["inside"], b["edge"].value)

    with pytest.warns(UserWarning, match=r"different sizes along dim 0.*fs.Rows\(points\).*reads both as .value"):
        want = trained(plain, {"inside": INSIDE, "edge": EDGE})
    batch = {"inside": INSIDE, "edge": fs.Rows(EDGE)}
    w = torch.ones(2, requires_grad=True)
    points({"w": w}, INSIDE, EDGE).backward()
    assert w.grad is not None
    for found in (want, trained(marked, batch), trained(marked, batch, accumulate=2)):
        torch.testing.assert_close(found, (w - 0.1 * w.grad).detach())
    with pytest.raises(BatchError, match=r"fs.Rows\(value\); the loss reads both as .value"):
        trained(plain, {"inside": INSIDE, "edge": EDGE}, accumulate=2, ranks=1)


USES: list[Callable[[Tensor, Any], Any]] = [
    lambda x, v: x * v,
    lambda x, v: x @ v,
    lambda x, v: F.linear(x, v),
    lambda x, v: torch.stack([x[0], v]),
    lambda x, v: x * v[0],
    lambda x, v: x * v.sum(),
    lambda x, v: x.to(v.dtype),
]


def test_a_whole_that_is_used_as_its_value() -> None:
    for use in USES:
        with pytest.raises((TreeError, AttributeError), match=r"fs.Whole was used .*read it as batch\['name'\].value"):
            use(torch.ones(3, 2), fs.Whole(torch.ones(2)))
    batch = {"x": EDGE, "v": fs.Whole(torch.ones(2))}
    with pytest.raises(TreeError, match=r"by mul\(...\): read it as batch\['name'\].value"):
        trained(lambda p, b: (b["x"] * b["v"]).sum() * p["w"].sum(), batch, ranks=1)
    trained(lambda p, b: (b["x"] * b["v"].value * p["w"]).mean(), batch)


def test_an_embedding_with_a_largest_norm() -> None:
    class Table(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            rows = F.embedding(x, self.weight)
            return rows * (1.0 / rows.norm(dim=-1, keepdim=True)).clamp(max=1)

    def first(module: nn.Module) -> Tensor:
        model = fs.split(module)
        plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
        step = fs.make_train_step(lambda p, x: model.apply(p, x).sum(), OPT, plan)
        loss: Tensor = step(fs.init_state(plan, OPT, params=model.params), torch.tensor([1, 2]))[1].loss
        return loss

    with pytest.raises(UnitError, match=r"max_norm= scales rows of its weight in place: look up F.embedding"):
        first(nn.Embedding(5, 3, max_norm=1.0))
    torch.manual_seed(0)
    table = Table(5, 3)
    plain = nn.Embedding(5, 3, max_norm=1.0)
    plain.weight.data.copy_(table.weight)
    torch.testing.assert_close(first(table), plain(torch.tensor([1, 2])).sum().detach())


def test_a_window_that_is_shorter() -> None:
    plan = fs.make_plan(W, fs.make_mesh((1,), ("data",)), [("w", fs.fsdp("data"))], batch=fs.P("data"))

    def loss(p: Any, x: Tensor) -> fs.Mean:
        return fs.Mean((x @ p["w"]).square().sum(), x.shape[0])

    def step(count: int) -> Any:
        return fs.make_train_step(loss, OPT, plan, accumulate=count, donate=False)

    state = fs.init_state(plan, OPT, params=W)
    state, _ = step(4)(state, fs.Microbatches([*INSIDE.split(2)]))
    parts = [EDGE[:1], EDGE[1:]]
    with pytest.raises(BatchError, match=r"holds 2 batches.*a second step with accumulate=2.*without rows \(x\[:0\]\)"):
        step(4)(state, fs.Microbatches(parts))
    want = step(1)(state, EDGE)[0].params["w"]
    for found in (
        step(2)(state, fs.Microbatches(parts)),
        step(4)(state, fs.Microbatches([*parts, EDGE[:0], EDGE[:0]])),
    ):
        torch.testing.assert_close(found[0].params["w"], want)
