"""Chunks of logits in sharded steps: means over unequal counts, units, graphs, and the account of memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from tests.losses.plain import DOUBLE, close, whole
from tests.shared.workers import Pools

ROWS, WIDTH, CLASSES, LR = 8, 16, 512, 0.5


class Head(nn.Module):
    """A head and its loss, with whole logits if ``chunks`` is 0."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        self.chunks, self.weight = chunks, nn.Parameter(torch.randn(13, 8))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        if self.chunks:
            return fs.chunked_cross_entropy(hidden, self.weight, labels, chunks=self.chunks)  # type: ignore[no-any-return]
        return whole(hidden.flatten(0, -2), self.weight, labels.flatten())


class Net(nn.Module):
    """Tokens to the loss of the same tokens."""

    def __init__(self, chunks: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.body, self.head = nn.Embedding(13, 8), nn.Linear(8, 8), Head(chunks)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))), tokens)  # type: ignore[no-any-return]


def trained(chunks: int, **options: Any) -> tuple[list[float], str]:
    """The losses of three steps of a model whose head is a unit, and what its units became."""
    model = fs.split(Net(chunks), units=("body", "head"))
    plan = fs.make_plan(model, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(LR)
    step = fs.make_train_step(lambda params, tokens: model.apply(params, tokens), opt, plan, **options)
    state, losses = fs.init_state(plan, opt, params=model.params), []
    for _ in range(3):
        state, metrics = step(state, torch.arange(24).view(4, 6) % 13)
        losses.append(float(metrics.loss))
    return losses, str(step.units) if "compile" in options else ""


@pytest.mark.parametrize("options", [{}, {"remat": "all"}, {"compile": "fx"}, {"accumulate": 2}], ids=str)
def test_a_head_that_is_a_unit(options: dict[str, Any]) -> None:
    losses, units = trained(5, **options)
    assert losses == pytest.approx(trained(0)[0], rel=1e-6)
    assert "head: fx graph" in units or "compile" not in options


def tied() -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """A table that is also the head, tokens with labels of which one row has few, and the loss and the table after."""
    torch.manual_seed(0)
    embed = torch.randn(13, 8, dtype=DOUBLE, requires_grad=True)
    tokens, labels = torch.randint(13, (4, 6)), torch.randint(13, (4, 6))
    labels[0, 1:] = -100
    want = whole(torch.tanh(embed[tokens]).flatten(0, 1), embed, labels.flatten())
    after = embed - LR * torch.autograd.grad(want, embed)[0]
    return embed.detach(), {"tokens": tokens, "labels": labels}, want.detach(), after.detach()


def on_rank(mesh: fs.Mesh, **options: Any) -> None:
    """On a rank: a step."""

    def loss(params: Any, batch: Any) -> Any:
        hidden = torch.tanh(params["embed"][batch["tokens"]])
        return fs.chunked_cross_entropy(hidden, params["embed"], batch["labels"], chunks=4, reduction="parts")

    embed, batch, want, after = tied()
    plan = fs.make_plan({"embed": embed}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(LR)
    step = fs.make_train_step(loss, opt, plan, **options)
    state, metrics = step(fs.init_state(plan, opt, params={"embed": embed}), plan.local_batch(batch))
    close(fs.unshard(fs.settle(state).params, plan)["embed"], after)
    assert float(metrics.loss) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=str)
def test_ranks_of_unequal_counts_with_tied_embeddings(options: dict[str, Any]) -> None:
    mesh = fs.virtual_mesh((2,), ("data",))
    mesh.run(lambda: on_rank(mesh, **options))


def on_process() -> None:
    """On a process: the same."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        on_rank(mesh, compile="fx")


def test_processes(pool: Pools) -> None:
    pool(2).run(on_process)


def test_second_derivatives_of_shards() -> None:
    torch.manual_seed(0)
    params, along = ({"w": torch.randn(13, 8, dtype=DOUBLE)} for _ in range(2))
    batch = {"x": torch.randn(6, 8, dtype=DOUBLE), "y": torch.arange(6)}
    plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    mine = lambda p, b: fs.chunked_cross_entropy(torch.tanh(b["x"]), p["w"], b["y"], chunks=3)  # noqa: E731
    plain = lambda p, b: whole(torch.tanh(b["x"]), p["w"], b["y"])  # noqa: E731
    flat = [{"w": each["w"].flatten()} for each in (params, along)]
    close(fs.func.hvp(mine, plan)(*flat, batch), fs.func.hvp(plain, plan)(*flat, batch))


def test_the_account_of_logits_is_divided_by_the_chunks() -> None:
    params = {"body": {"w": torch.zeros(WIDTH, WIDTH)}, "head": torch.zeros(CLASSES, WIDTH)}
    plan = fs.make_plan(params, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    batch = {"x": torch.zeros(256, WIDTH), "y": torch.zeros(256, dtype=torch.long)}
    logits = 256 * CLASSES * 4

    def peak(chunks: int | None) -> int:
        def loss(params: Any, batch: Any) -> Any:
            hidden = torch.tanh(batch["x"] @ params["body"]["w"])
            if chunks is None:
                return whole(hidden, params["head"], batch["y"])
            return fs.chunked_cross_entropy(hidden, params["head"], batch["y"], chunks=chunks)

        step = fs.make_train_step(loss, fs.optim.sgd(LR), plan)
        return max(need.peak for need in step.trace(batch).needs)

    peaks = {chunks: peak(chunks) for chunks in (None, 1, 2, 4, 8)}
    for chunks in (2, 4, 8):
        assert peaks[1] - peaks[chunks] == pytest.approx(logits * (1 - 1 / chunks), rel=0.01)
    assert (peaks[None] or 0) > 2 * logits + peaks[8]
