"""Orders, loaders and packed rows: what they give, and that a position means the same on any number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fshard as fs
from fshard.data import Loader, Order, Packed, document_mask
from fshard.data.order import SMALL, _keys, _walked
from fshard.errors import CheckpointError, PlanError


def plan_of(ranks: int = 1, rank: int = 0, batch: Any = None, axes: Any = ("data",), sizes: Any = None) -> Any:
    mesh = fs.abstract_mesh(sizes or (ranks,), axes, rank=rank)
    return fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.P())], batch=batch or fs.P("data"))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.booleans())
def test_each_epoch_has_every_sample_once(length: int, batch: int, seed: int, shuffle: bool) -> None:
    order = Order(length, batch, seed, shuffle, "keep")
    for epoch in range(3):
        found = [order(epoch * order.batches + n) for n in range(order.batches)]
        assert sorted(torch.cat(found).tolist()) == list(range(length))
        assert [len(rows) for rows in found[:-1]] == [batch] * (len(found) - 1)


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 1000])
def test_the_cipher_of_large_sets_is_a_permutation(length: int) -> None:
    assert sorted(_walked(torch.arange(length), length, _keys(0, 1)).tolist()) == list(range(length))


def test_large_sets_are_shuffled_without_their_length_in_memory() -> None:
    order = Order(10**12, batch=4096, seed=1)
    one, again, other, next_epoch = order(7), order(7), Order(10**12, 4096, seed=2)(7), order(7 + order.batches)
    assert torch.equal(one, again) and len(set(one.tolist())) == 4096 and 0 <= one.min() and one.max() < 10**12
    assert not torch.equal(one, other) and not torch.equal(one, next_epoch)


@pytest.mark.parametrize("length", [1000, 4 * SMALL])
def test_a_shuffle_mixes(length: int) -> None:
    # Where the first tenth of an epoch comes from: ten equal parts, by a chi-squared of nine degrees of freedom.
    for seed in range(3):
        rows = Order(length, length // 10, seed)(0)
        counts = torch.bincount(rows * 10 // length, minlength=10).double()
        expected = len(rows) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 35
        assert (rows.diff() == 1).float().mean() < 0.02


def test_an_order_is_what_it_was() -> None:
    """These numbers never change: they are in the checkpoints of runs."""
    assert Order(10, 5, seed=0)(0).tolist() == FROZEN_SMALL
    assert Order(1 << 20, 4, seed=0)(3).tolist() == FROZEN_LARGE


FROZEN_SMALL = [9, 1, 4, 6, 0]
FROZEN_LARGE = [60072, 611143, 847812, 881775]


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_a_batch_as_local_batch_cuts_it(shuffle: bool) -> None:
    data = torch.arange(26).view(13, 2) * 10
    whole = next(iter(Loader(data, plan_of(), batch=6, shuffle=shuffle)))
    for ranks in (1, 2, 3, 6):
        for rank in range(ranks):
            plan = plan_of(ranks, rank)
            mine = next(iter(Loader(data, plan, batch=6, shuffle=shuffle)))
            assert torch.equal(mine, plan.local_batch(whole))


def test_other_dims_are_cut_too_and_tensor_parallel_ranks_get_the_same() -> None:
    data, sizes, axes = torch.arange(64).view(8, 8), (2, 2, 2), ("data", "context", "tp")
    spec = fs.P("data", "context")
    whole = next(iter(Loader(data, plan_of(), batch=4)))
    for rank in range(8):
        plan = plan_of(rank=rank, batch=spec, axes=axes, sizes=sizes)
        assert torch.equal(next(iter(Loader(data, plan, batch=4))), plan.local_batch(whole))


def test_a_position_means_the_same_on_any_number_of_ranks() -> None:
    data = torch.arange(40)
    plain = [batch for batch, _ in zip(Loader(data, plan_of(), batch=12), range(9), strict=False)]
    saved = None
    for ranks, begin, end in ((2, 0, 2), (3, 2, 5), (1, 5, 6), (4, 6, 9)):
        loaders = [Loader(data, plan_of(ranks, rank), batch=12) for rank in range(ranks)]
        for loader in loaders if saved is not None else ():
            loader.load_state_dict(saved)
        for number, parts in zip(range(begin, end), zip(*loaders, strict=True), strict=False):
            assert torch.equal(torch.cat(parts), plain[number])
            if number == end - 1:
                saved = json.loads(json.dumps(loaders[0].state_dict()))
                assert all(loader.state_dict() == saved for loader in loaders)
                break


def test_epochs_end_and_partial_batches_are_kept_or_dropped() -> None:
    data = torch.arange(10)
    assert [len(batch) for batch in Loader(data, plan_of(), batch=4, epochs=2)] == [4] * 4
    loader = Loader(data, plan_of(), batch=4, epochs=2, partial="keep")
    found = list(loader)
    assert [len(batch) for batch in found] == [4, 4, 2, 4, 4, 2] and list(loader) == []
    assert sorted(torch.cat(found[:3]).tolist()) == sorted(torch.cat(found[3:]).tolist()) == list(range(10))
    parts = [list(Loader(data, plan_of(3, rank), batch=6, epochs=1, partial="keep")) for rank in range(3)]
    assert [len(batches[1]) for batches in parts] == [1, 1, 2]
    pairs = [(torch.ones(3), number) for number in range(7)]
    parts = [list(Loader(pairs, plan_of(3, rank), batch=6, epochs=2, partial="keep")) for rank in range(3)]
    assert [[tuple(x.shape) for x in batches[1]] for batches in parts] == [[(0, 3), (0,)]] * 2 + [[(1, 3), (1,)]]


@pytest.mark.long
def test_workers_that_load_ahead_do_not_move_the_position() -> None:
    data = torch.arange(40)
    loader = Loader(data, plan_of(), batch=4, num_workers=1, prefetch_factor=4)
    batches = iter(loader)
    first = [next(batches), next(batches)]
    assert loader.state_dict()["position"] == 2
    del batches
    again = Loader(data, plan_of(), batch=4)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=False))
    third = Loader(data, plan_of(), batch=4)
    third.load_state_dict(loader.state_dict())
    assert torch.equal(next(iter(third)), next(iter_from(again, 2)))


def iter_from(loader: Loader, number: int) -> Any:
    loader.load_state_dict({**loader.state_dict(), "position": number})
    return iter(loader)


def trained(folder: Path, mesh: Any, end: int, batches: Any = None, stop: int | None = None) -> list[float]:
    """The losses of a run that resumes from a folder."""
    plan = fs.make_plan({"w": torch.ones(4)}, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
    opt = fs.optim.sgd(0.01)
    step = fs.make_train_step(lambda params, x: ((x @ params["w"]) ** 2).mean(), opt, plan)
    data = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    loader = batches(data) if batches else Loader(data, plan, batch=12)
    losses = []
    with fs.Checkpointer(folder, every=2) as checkpoints:
        start = lambda: fs.init_state(plan, opt, params={"w": torch.ones(4)})  # noqa: E731
        for state, metrics in fs.train_loop(step, start, loader, steps=end, checkpoints=checkpoints):
            losses.append(metrics.loss.item())
            if state.step == stop:
                break
    return losses


@pytest.mark.long
def test_a_run_resumes_exactly_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", fs.make_mesh((1,), ("data",)), 9)
    found: list[float] = []
    for ranks, end in ((2, 4), (3, 6), (1, 9)):
        mesh = fs.virtual_mesh((ranks,), ("data",))
        runs = mesh.run(lambda n=ranks, end=end: trained(tmp_path / "run", fs.make_mesh((n,), ("data",)), end))
        assert all(run == runs[0] for run in runs)
        found += runs[0]
    assert found == pytest.approx(plain, rel=1e-5)


def test_a_run_that_is_cut_off_makes_its_steps_again(tmp_path: Path) -> None:
    mesh = fs.make_mesh((1,), ("data",))
    plain = trained(tmp_path / "plain", mesh, 6)
    assert trained(tmp_path / "run", mesh, 6, stop=5) == plain[:5]
    assert trained(tmp_path / "run", mesh, 6) == plain[4:]


def test_checkpointers_save_a_loaders_position(tmp_path: Path) -> None:
    plan = fs.make_plan({"w": torch.ones(4)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    opt = fs.optim.sgd(0.1)
    loader = Loader(torch.arange(8), plan, batch=2)
    next(iter(loader))
    with fs.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(fs.init_state(plan, opt, params={"w": torch.ones(4)}), data=loader)
        checkpoints.restore(plan, opt)
        again = Loader(torch.arange(8), plan, batch=2)
        again.load_state_dict(checkpoints.restored.data)
        assert again.position == 1
        plain = torch.utils.data.DataLoader(torch.arange(8))
        with pytest.raises(CheckpointError, match="DataLoader has no position that a checkpoint could hold"):
            checkpoints.save(fs.init_state(plan, opt, params={"w": torch.ones(4)}), data=plain, overwrite=True)


def test_a_loader_without_a_position_is_refused_where_it_must_be_saved(tmp_path: Path) -> None:
    mesh = fs.make_mesh((1,), ("data",))
    with pytest.raises(PlanError, match=r"DataLoader has no position .*fs.data.Loader.*StatefulDataLoader"):
        trained(tmp_path, mesh, 2, lambda data: torch.utils.data.DataLoader(data, batch_size=12))


@pytest.mark.filterwarnings("ignore")
def test_torchdata_resumes_on_as_many_ranks(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __init__(self, data: Tensor) -> None:
            self.data, self.at = data, 0

        def __iter__(self) -> Any:
            while True:
                self.at += 1
                yield self.data[self.at % len(self.data)]

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def batches(data: Tensor) -> Any:
        return stateful(Stream(data), batch_size=3)

    mesh = fs.make_mesh((1,), ("data",))
    plain = trained(tmp_path / "plain", mesh, 5, batches)
    assert trained(tmp_path / "run", mesh, 2, batches) + trained(tmp_path / "run", mesh, 5, batches) == plain
    with pytest.raises(PlanError, match=r"only it knows its order: give fs.train_loop torchdata's.*fshard\[data\]"):
        Loader(Stream(torch.ones(3)), plan_of(), batch=1)


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: Loader(torch.arange(9), plan_of(2), batch=5),
            r"batch=5. is not a multiple of 2, the ranks along 'data'",
        ),
        (lambda: Loader(torch.arange(9), plan_of(), batch=10), "batch = 10: must not be above length = 9"),
        (lambda: Loader(torch.arange(9), plan_of(), batch=2, sampler=None), "sampler cannot be given"),
        (lambda: Loader(torch.arange(9), plan_of(), batch=2, epochs=0), "epochs=0"),
        (lambda: Loader(torch.arange(9), "x", batch=2), "plan is 'x'"),  # type: ignore[arg-type]
        (lambda: Loader(iter([1]), plan_of(), batch=2), "only it knows its order"),
        (lambda: Order(0, -1, "x", partial="no"), r"length = 0.*\n.*batch = -1.*\n.*seed = 'x'.*\n.*partial = 'no'"),  # type: ignore[arg-type]
        (lambda: Packed([[1], []], 4), r"documents\[1\] has no token"),
        (lambda: Packed([[1] * 5], 4, split=False), r"documents\[0\] has 5 tokens"),
        (lambda: Packed([[1]], 0), "the tokens of a row, >= 1"),
    ],
)
def test_what_cannot_be(call: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        call()


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch": 3}, {"shuffle": False}, {"partial": "keep"}])
def test_a_position_of_another_order_is_refused(change: dict[str, Any]) -> None:
    saved = Loader(torch.arange(9), plan_of(), **{"batch": 2, **change}).state_dict()
    with pytest.raises(CheckpointError, match=f"{next(iter(change))}: saved"):
        Loader(torch.arange(9), plan_of(), batch=2).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="not a position of an fs.data.Loader"):
        Loader(torch.arange(9), plan_of(), batch=2).load_state_dict({"batches": 3})


@settings(max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 16), st.booleans())
def test_packed_rows_hold_every_token_once(sizes: list[int], length: int, split: bool) -> None:
    documents = [[100 * n + i + 1 for i in range(size)] for n, size in enumerate(sizes)]
    rows = Packed(documents, length, split=split)
    held, pairs = [], []
    for n in range(len(rows)):
        row = rows[n]
        real = row["documents"] >= 0
        held += row["tokens"][real].tolist()
        pairs += [(a, b) for a, b in zip(row["tokens"].tolist(), row["targets"].tolist(), strict=True) if b != -100]
        assert not row["tokens"][~real].any() and (row["targets"][~real] == -100).all()
        for part in set(row["documents"][real].tolist()):
            assert row["positions"][row["documents"] == part].tolist() == list(range((row["documents"] == part).sum()))
    assert sorted(held) == sorted(token for document in documents for token in document)
    assert sorted(pairs) == sorted(pair for d in documents for pair in zip(d, d[1:], strict=False))
    if split:
        assert len(rows) == -(-sum(sizes) // length)
    assert rows.filled == pytest.approx(sum(sizes) / (len(rows) * length))


def test_whole_documents_fill_rows_well() -> None:
    sizes = torch.randint(1, 65, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    assert Packed([[1] * size for size in sizes], 64, split=False).filled > 0.97


def test_packed_attention_is_that_of_each_document_alone() -> None:
    torch.manual_seed(0)
    rows = Packed([[1, 2, 3], [4, 5, 6, 7], [8]], 8)
    batch = next(iter(Loader(rows, plan_of(), batch=1, shuffle=False)))
    q = torch.randn(1, 2, 8, 4)
    mixed = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=document_mask(batch["documents"]))
    for begin, end in ((0, 3), (3, 7), (7, 8)):
        part = q[:, :, begin:end]
        alone = torch.nn.functional.scaled_dot_product_attention(part, part, part, is_causal=True)
        assert torch.allclose(mixed[:, :, begin:end], alone, atol=1e-6)
