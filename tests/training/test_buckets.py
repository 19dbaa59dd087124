"""Batches of varying lengths in buckets: the numbers of plain PyTorch without padding, few graphs, told mistakes."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard.errors import BatchError, PlanError, ShardError
from tests.shared.virtual import Virtual
from tests.shared.workers import Pools

VOCABULARY, WIDTH, STEPS = 11, 8, 20
FILL = {"tokens": 0, "labels": -100, "mask": False}
BUCKETS = fs.Buckets(FILL)


class Mixing(nn.Module):
    """Attention without causality: it reads padding unless a mask hides it."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = self.into(x).chunk(3, -1)
        return x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, mask[:, None, :])))


class Encoder(nn.Module):
    """Two layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList([Mixing(dropout) for _ in range(2)])

    def forward(self, tokens: Any, mask: Any) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def encoder(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Encoder(dropout).double()


def batch_of(number: int, rank: int, rows: int = 4) -> dict[str, Any]:
    """Rows of a rank, as long as the longest of them: other ranks and steps have other lengths."""
    draw = torch.Generator().manual_seed(100 * number + rank)
    size = int(torch.randint(3, 40, (), generator=draw))
    tokens = torch.randint(VOCABULARY, (rows, size), generator=draw)
    mask = torch.arange(size) < torch.randint(2, size + 1, (rows, 1), generator=draw)
    return {"tokens": tokens, "labels": torch.where(mask, tokens.flip(1), -100), "mask": mask}


def told_of(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], fs.Mean]:
    def loss(params: Any, batch: Any) -> fs.Mean:
        logits = apply(params, batch)
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        return fs.Mean(losses, (batch["labels"] != -100).sum())

    return loss


def plain(world: int) -> list[float]:
    """The losses of one process on the batches of all ranks, one after the other."""
    model = encoder()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for number in range(STEPS):
        batches = [batch_of(number, rank) for rank in range(world)]
        means = [told_of(lambda _, b: model(b["tokens"], b["mask"]))(None, batch) for batch in batches]
        loss = sum(mean.total for mean in means) / sum(mean.count for mean in means)
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def made(mesh: fs.Mesh, dropout: float = 0.0) -> tuple[Any, fs.Plan, Any]:
    model = fs.split(encoder(dropout), units=("blocks.*",))
    plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    return model, plan, told_of(lambda params, b: model.apply(params, b["tokens"], b["mask"]))


def trained(compile: str | None, accumulate: int, buckets: fs.Buckets | None) -> tuple[list[float], str, float]:
    """On a rank: the losses of steps on ragged batches, what its units ran as, and an evaluation after them."""
    with fs.make_mesh((-1,), ("data",)) as mesh:
        model, plan, loss = made(mesh)
        opt = fs.optim.adamw(0.01, weight_decay=0.01)
        step = fs.make_train_step(loss, opt, plan, compile=compile, accumulate=accumulate, buckets=buckets)
        evaluate = fs.make_eval_step(loss, plan, buckets=buckets)
        state, losses = fs.init_state(plan, opt, params=model.params), []
        for number in range(STEPS):
            state, metrics = step(state, batch_of(number, mesh.rank))
            losses.append(float(metrics.loss))
        return losses, step.units, float(evaluate(state, batch_of(STEPS, mesh.rank)))


def graphs(units: str) -> int:
    """The number of graphs of a unit."""
    return next(line for line in units.splitlines() if line.startswith("blocks.0")).count("fx graph")


@pytest.mark.parametrize(("world", "compile", "accumulate"), [(1, "fx", 1), (3, "fx", 2)])
def test_twenty_lengths(world: int, compile: str | None, accumulate: int) -> None:
    want = plain(world)
    ranks = Virtual(world).run(trained, compile, accumulate, BUCKETS)
    for losses, units, evaluated in ranks:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-9, atol=0)
        assert evaluated == ranks[0][2]
        if compile:
            assert graphs(units) <= 5 and "as it is" not in units, units
    assert len({batch_of(number, 0)["tokens"].shape for number in range(STEPS)}) > 12


def staged(buckets: fs.Buckets | None) -> tuple[list[float], int]:
    """On a rank of two stages: the losses, and the number of traces."""
    with fs.make_mesh((2, -1), ("stage", "data")) as mesh:
        model, _, loss = made(mesh)
        rules, stages = [(".*", fs.fsdp("data"))], fs.Stages("stage", leaves=[("head.*", 1)])
        plan = fs.make_plan(model, mesh, rules, batch=fs.P("data"), stages=stages)
        opt = fs.optim.adamw(0.01, weight_decay=0.01)
        step: Any = fs.make_train_step(loss, opt, plan, accumulate=2, buckets=buckets)
        state, losses = fs.init_state(plan, opt, params=model.params), []
        for number in range(STEPS):
            state, metrics = step(state, batch_of(number, mesh.index("data")))
            losses.append(float(metrics.loss))
        return losses, len(step._staged.cuts)


@pytest.mark.long
def test_stages_of_a_pipeline() -> None:
    """One trace a bucket, and one for the batch that is compared without its padding."""
    for losses, traces in Virtual(4).run(staged, BUCKETS):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain(2)), rtol=1e-9, atol=0)
        assert traces == 5  # 8, 16, 32, 64, and the first batch as it was


@pytest.mark.long
def test_processes(pool: Pools) -> None:
    want = plain(2)
    for losses, _, _ in pool(2).run(trained, None, 1, BUCKETS):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(want), rtol=1e-9, atol=0)


def test_dropout_does_not_hinder_the_check() -> None:
    mesh = fs.make_mesh((1,), ("data",))
    model, plan, loss = made(mesh, dropout=0.5)
    opt = fs.optim.sgd(0.1)
    both = []
    for check in (True, False):
        step = fs.make_train_step(loss, opt, plan, buckets=fs.Buckets(FILL, check=check))
        state = fs.init_state(plan, opt, params=model.params)
        both.append([(state := out[0], out[1].loss)[1] for n in range(3) for out in [step(state, batch_of(n, 0))]])
    assert both[0] == both[1]  # the check leaves random numbers and the state as they are
    assert both[0][0] != told_of(lambda _, b: encoder()(b["tokens"], b["mask"]))(None, batch_of(0, 0)).total


def refused(mesh: fs.Mesh, buckets: Any, wrong: str = "", evaluation: bool = False) -> str:
    """What a step says of its first batch, and whether its state can be used after that."""
    model, plan, loss = made(mesh)

    def other(params: Any, batch: Any) -> Any:
        logits = model.apply(params, batch["tokens"], batch["mask"] | (wrong == "mask"))
        if wrong == "count":
            return (
                F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                / batch["labels"].numel()
            )
        return loss(params, batch) if not wrong else F.cross_entropy(logits.mT, batch["labels"])

    opt = fs.optim.sgd(0.1)
    state = fs.init_state(plan, opt, params=model.params)
    batch = batch_of(mesh.rank, 0)  # 35 and 5 long
    try:
        if evaluation:
            fs.make_eval_step(other, plan, buckets=buckets)(state, batch)
        else:
            fs.make_train_step(other, opt, plan, buckets=buckets)(state, batch)
    except ShardError as error:
        fs.make_train_step(loss, opt, plan)(state, batch)
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("wrong", ["mask", "count"])
def test_a_loss_that_reads_padding_is_refused_on_all_ranks(wrong: str, evaluation: bool) -> None:
    def job() -> str:
        with fs.make_mesh((-1,), ("data",)) as mesh:
            return refused(mesh, BUCKETS, wrong, evaluation)

    for text in Virtual(2).run(job):
        assert text.startswith("BatchError") and "without padding and" in text and "fs.Mean(total, count)" in text


def test_equal_losses_do_not_hide_other_gradients() -> None:
    """A head of zeros gives all labels the same loss."""
    mesh = fs.make_mesh((1,), ("data",))
    params = {"table": torch.ones(5, 3, dtype=torch.float64), "head": torch.zeros(3, 5, dtype=torch.float64)}
    plan = fs.make_plan(params, mesh, [(".*", fs.fsdp("data"))])

    def loss(params: Any, x: Any) -> Any:
        return F.cross_entropy((F.embedding(x, params["table"]) @ params["head"]).flatten(0, 1), x.flatten())

    opt = fs.optim.sgd(0.1)
    step = fs.make_train_step(loss, opt, plan, buckets=fs.Buckets(0))
    with pytest.raises(BatchError, match=r"changes what the function computes: \d\S+ without padding"):
        step(fs.init_state(plan, opt, params=params), torch.tensor([[1, 2, 3, 1, 4]]))


def uneven(rank: int) -> Any:
    return fs.Buckets({"tokens": 0, "labels": -100} if rank else FILL)


@pytest.mark.parametrize(
    ("buckets", "said"),
    [
        (lambda rank: uneven(1), r"batch\['mask'\]: no value for it"),
        (lambda rank: fs.Buckets({**FILL, "more": 0}), r"batch\['more'\]: the batch has no such leaf"),
        (lambda rank: fs.Buckets(FILL, sizes=(4, 16)), r"batch\['labels'\] has \d+ along dim 1, more than the largest"),
        (lambda rank: fs.Buckets(FILL, dim=2), "no dim 2 to pad"),
        (lambda rank: fs.Buckets({**FILL, "tokens": 0.5}), r"batch\['tokens'\] is of torch.int64, which cannot hold"),
        (lambda rank: fs.Buckets(FILL, sizes=(64 << rank,)), "ranks differ in what must be equal"),
        (lambda rank: BUCKETS if rank else None, "ranks differ in what must be equal"),
        (uneven, r"no value for it|PeerError|rank 1"),
    ],
)
def test_bad_buckets_are_told_on_all_ranks(buckets: Callable[[int], Any], said: str) -> None:
    def job() -> str:
        with fs.make_mesh((-1,), ("data",)) as mesh:
            return refused(mesh, buckets(mesh.rank))

    for text in Virtual(2).run(job):
        assert re.search(said, text), text


def test_invalid_buckets() -> None:
    for told, make in [
        ("dim 0 has the rows", lambda: fs.Buckets(0, dim=0)),
        ("increasing", lambda: fs.Buckets(0, sizes=(8, 4))),
        ("fill= has", lambda: fs.Buckets(torch.ones(1))),
        ("check=", lambda: fs.Buckets(0, check=1)),
    ]:
        with pytest.raises(PlanError, match=told):
            make()
    mesh = fs.abstract_mesh((2, 2), ("data", "cp"))
    plan = fs.make_plan({"w": torch.ones(2)}, mesh, [(".*", fs.P())], batch=fs.P("data", "cp"))
    opt = fs.optim.sgd(0.1)
    with pytest.raises(PlanError, match=r"cuts it over cp.*plan.local_batch\(buckets.pad\(batch\)\)"):
        fs.make_train_step(lambda p, b: b.sum(), opt, plan, buckets=fs.Buckets(0))
    with pytest.raises(PlanError, match="check=False"):
        early = fs.Policy(update="in_backward")
        fs.make_train_step(lambda p, b: b.sum(), opt, plan, schedule=early, buckets=fs.Buckets(0, dim=2))
    with pytest.raises(PlanError, match=r"must be fs.Buckets\(fill\) or None"):
        fs.make_eval_step(lambda p, b: b.sum(), plan, buckets=8)


def test_parts_of_a_step_take_padded_batches() -> None:
    mesh = fs.make_mesh((1,), ("data",))
    model, plan, loss = made(mesh)
    opt = fs.optim.sgd(0.1)
    grad, update = fs.value_and_grad(loss, plan, compile="fx"), fs.make_update(opt, plan)
    inside = fs.make_eval_step(loss, plan, buckets=BUCKETS)

    def train(state: Any, batch: Any) -> Any:
        value, grads = grad(state, batch)
        return update(state, grads)[0], value

    step, state, want = fs.make_step(train, plan), fs.init_state(plan, opt, params=model.params), plain_sgd()
    for number in range(4):
        state, value = step(state, BUCKETS.pad(batch_of(number, 0)))
        assert float(value) == pytest.approx(want[number], rel=1e-9)
    with pytest.raises(PlanError, match=r"step\(state, buckets.pad\(batch\)\)"):
        fs.make_step(lambda state, batch: (state, inside(state, batch)), plan)(state, batch_of(0, 0))


def plain_sgd() -> list[float]:
    model, found = encoder(), []
    for number in range(4):
        mean = told_of(lambda _, b: model(b["tokens"], b["mask"]))(None, batch_of(number, 0))
        grads = torch.autograd.grad(mean.total / mean.count, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p -= 0.1 * g
        found.append((mean.total / mean.count).item())
    return found


def test_microbatches_have_buckets_of_their_own() -> None:
    parts = fs.Microbatches([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 9)}])
    padded = fs.Buckets({"x": 7.0}).pad(parts)
    assert [part["x"].shape[1] for part in padded.parts] == [4, 16]
    assert padded.parts[0]["x"][0].tolist() == [1, 1, 1, 7]
    same = torch.ones(2, 16)
    assert fs.Buckets(0, sizes=(16, 64)).pad(same) is same
