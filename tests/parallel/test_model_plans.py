"""Models of others, parallel by the plans that they bring, train and generate as in one plain process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fshard as fs
from fshard import tree
from tests.parallel.plan_models import (
    DENSE,
    MIXED,
    MORE_MIXED,
    batch,
    differentiate,
    far_gradients,
    hugging_face,
    net,
    plain,
    planned,
    train,
)
from tests.shared import parity
from tests.shared.workers import Pools

TP = ("data", "tp")


def on_ranks(module: nn.Module, axes: tuple[str, ...], *given: Any, run: Any = train, **options: Any) -> list[Any]:
    mesh = fs.virtual_mesh((2,) * len(axes), axes)
    return mesh.run(run, module, axes, *given, **options)  # type: ignore[no-any-return]


def test_every_style_of_layers_equals_one_process() -> None:
    want = plain(net())
    assert parity.differences(on_ranks(net(), TP, debug=True), want) == []
    assert parity.differences(on_ranks(net(), TP, {"blocks.*.norm": None}, remat="all"), want) == []


def derived() -> tuple[Any, ...]:
    """On a rank: gradients in three ways, and an evaluated loss."""
    mesh = fs.make_mesh((2, 2), TP)
    model, plan = planned(net(), mesh)
    params, mine = fs.shard(model.params, plan), plan.local_batch(batch(0))

    def loss(p: Any, b: Any) -> Any:
        return model.apply(p, **b)

    value, grads = fs.value_and_grad(loss, plan)(params, mine)
    more, other = torch.func.grad_and_value(fs.func.sharded_loss(loss, plan))(params, mine)[::-1]
    seen = fs.make_eval_step(loss, plan)(fs.init_state(plan, params=model.params), mine)
    full = [parity.whole(fs.unshard(tree_, plan)) for tree_ in (grads, other)]
    return [float(value), float(more), float(seen)], full


def test_gradients_and_evaluation_equal_one_process() -> None:
    module = net()
    loss = module(**batch(0))
    loss.backward()
    want = {path: leaf.grad for path, leaf in module.named_parameters() if leaf.grad is not None}
    for values, grads in fs.virtual_mesh((2, 2), TP).run(derived):
        assert values == pytest.approx([loss.item()] * 3, rel=1e-6)
        assert [parity.far_leaves(one, want, 1e-5) for one in grads] == [[], []]


@pytest.mark.long
def test_layers_equal_one_process_on_real_ranks(pool: Pools) -> None:
    assert parity.differences(pool(4).run(train, net(), TP), plain(net())) == []


@pytest.mark.long
@pytest.mark.sample(5)
@pytest.mark.parametrize("family", DENSE + MIXED)
def test_families_equal_one_process(family: str) -> None:
    pytest.importorskip("transformers")
    module = hugging_face(family)
    assert [far_gradients(one, module) for one in on_ranks(module, TP, run=differentiate)] == [[]] * 4
    ranks = on_ranks(module, TP)
    assert parity.differences(ranks, plain(module)) == []


@pytest.mark.long
def test_logits_in_chunks_of_a_cut_vocabulary_equal_one_process() -> None:
    pytest.importorskip("transformers")
    module = hugging_face("Llama", tie_word_embeddings=True)
    ranks = on_ranks(module, TP, chunks=3, debug=True)
    assert parity.differences(ranks, plain(module)) == []


@pytest.mark.long
@pytest.mark.sample(8)
@pytest.mark.parametrize("axes", [("data", "ep"), ("ep", "tp")])
@pytest.mark.parametrize("family", MIXED)
@pytest.mark.parametrize("experts", ["grouped_mm", "eager"])
def test_mixtures_equal_one_process(family: str, axes: tuple[str, ...], experts: str) -> None:
    pytest.importorskip("transformers")
    module: Any = hugging_face(family)
    module.set_experts_implementation(experts)
    assert [far_gradients(one, module) for one in on_ranks(module, axes, run=differentiate)] == [[]] * 4
    ranks = on_ranks(module, axes)
    assert parity.differences(ranks, plain(module)) == []


@pytest.mark.slow
@pytest.mark.parametrize("axes", [TP, ("data", "ep")], ids="x".join)
@pytest.mark.parametrize("family", MORE_MIXED)
def test_more_mixtures_equal_one_process(family: str, axes: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    module = hugging_face(family)
    ranks = on_ranks(module, axes)
    assert parity.differences(ranks, plain(module)) == []


def generated(module: nn.Module, prompts: list[list[int]], axes: tuple[str, ...]) -> list[list[int]]:
    """On a rank: how a model goes on with this rank's prompts."""
    mesh = fs.make_mesh((2, 2), axes)
    model, plan = planned(module, mesh)
    state = fs.init_state(plan, params=model.params)
    mine = prompts[plan.data_rank :: plan.data_size]
    return [row.tolist() for row in fs.generate(state, fs.generation.hugging_face(model), mine, max_new=6).tokens]


PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [13, 14], [15, 16, 17, 18]]


@pytest.mark.long
@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("family", "axes"), [(f, TP) for f in DENSE + MIXED] + [(f, ("data", "ep")) for f in MIXED], ids=str
)
def test_families_generate_token_for_token(family: str, axes: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    module: Any = hugging_face(family).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = module.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        expected.append(out[0].tolist()[len(prompt) :])
    ranks = fs.virtual_mesh((2, 2), axes).run(generated, module, PROMPTS, axes)
    for rank, found in enumerate(ranks):
        row = rank if axes == ("data", "ep") else rank // 2
        assert found == expected[row :: 4 if axes == ("data", "ep") else 2], rank


def read_and_written(module: nn.Module, folder: Path, axes: tuple[str, ...]) -> list[str]:
    """On a rank: read a model's files into shards, write them, and name the leaves that are not the module's."""
    mesh = fs.make_mesh((2, 2), axes)
    model, plan = planned(module, mesh)
    state = fs.io.load_hf(folder / "theirs", plan)
    full = dict(tree.paths(fs.unshard(state.params, plan)))
    fs.io.save_hf(state, folder / "ours", config=module.config)  # type: ignore[arg-type]
    return [path for path, leaf in tree.paths(model.params) if not torch.equal(leaf, full[path])]


@pytest.mark.long
@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("family", "axes"), [(f, TP) for f in DENSE + MIXED] + [(f, ("ep", "tp")) for f in MIXED], ids=str
)
def test_checkpoints_of_the_plain_model_are_read_and_written(
    family: str, axes: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    module: Any = hugging_face(family)
    module.save_pretrained(tmp_path / "theirs")
    assert fs.virtual_mesh((2, 2), axes).run(read_and_written, module, tmp_path, axes) == [[]] * 4
    again = type(module).from_pretrained(tmp_path / "ours")
    want = module.state_dict()
    assert all(torch.equal(leaf, want[path]) for path, leaf in again.state_dict().items())
