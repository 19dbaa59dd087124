"""Unchanged models of Hugging Face over a sequence that is cut over ranks equal the same models in one process."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

import fshard as fs
from fshard import P, parallel, tree
from fshard import collectives as c
from fshard.parallel import hf_attention as module
from tests.shared.workers import Pools

transformers = pytest.importorskip("transformers")

TIME, WORDS = 16, 40
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [0] * 16])
LAYOUTS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "ring": ("fshard_ring", (2,), ("cp",)),
    "heads": ("fshard_ulysses", (2,), ("cp",)),
    "both": ("fshard_ulysses", (2, 2), ("cp", "hp")),
}


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Registrations of a test go with it."""
    registries = (transformers.AttentionInterface, transformers.AttentionMaskInterface)
    before = [dict(each._global_mapping) for each in registries]
    parallel.register_attention()
    yield
    for each, entries in zip(registries, before, strict=True):
        each._global_mapping.clear()
        each._global_mapping.update(entries)


def model(kind: str, family: str = "Llama", **changes: Any) -> Any:
    """A tiny model with the same weights whatever its attention is, in float64."""
    torch.manual_seed(0)
    options: dict[str, Any] = {**SIZES, **HEADS, "attn_implementation": kind, **changes}
    if family == "GPT2":
        options = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "attn_implementation": kind, **changes}
        options |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = getattr(transformers, f"{family}Config")(pad_token_id=0, bos_token_id=1, eos_token_id=2, **options)
    made = next(
        getattr(transformers, name)
        for name in (f"{family}ForCausalLM", f"{family}LMHeadModel")
        if hasattr(transformers, name)
    )
    return made(config).double()


def tokens(step: int = 0) -> Tensor:
    """The rows of a step, on every rank."""
    return torch.randint(3, WORDS, (2, TIME), generator=torch.Generator().manual_seed(step))


def over_ranks(kind: str, mesh: fs.Mesh, batches: list[dict[str, Any]], **changes: Any) -> list[tuple[Tensor, Any]]:
    """On a rank: loss and gradients of the whole, for each batch, in one model."""
    parallel.register_attention(axis="cp", heads="hp" if "hp" in mesh.axis_names else None)
    split = fs.split(model(kind, **changes), units="auto")
    plan = fs.make_plan(split, mesh, [(".*", fs.fsdp(mesh.axis_names))], batch=P(None, mesh.axis_names))
    params = fs.shard(split.params, plan)
    both = fs.value_and_grad(fs.causal_lm_loss(split, chunks=2), plan)
    out = []
    for each in batches:
        loss, grads = both(params, parallel.context_batch(**each, axis=mesh.axis_names, mesh=mesh))
        out.append((loss, dict(tree.paths(fs.unshard(grads, plan)))))
    return out


def in_one_process(batch: dict[str, Any], **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of transformers' own model; documents are rows of their own there."""
    plain = model("eager", **changes)
    ids, documents = batch["input_ids"], batch.get("documents")
    total, count = torch.zeros((), dtype=torch.float64), 0
    for number, row in enumerate(ids):
        chosen = torch.zeros_like(row) if documents is None else documents[number]
        for part in (row[chosen == each] for each in chosen.unique()):
            logits = plain(input_ids=part[None]).logits[0, :-1]
            total, count = total + F.cross_entropy(logits, part[1:], reduction="sum"), count + len(part) - 1
    loss = total / count
    loss.backward()
    return loss.detach(), {path: leaf.grad for path, leaf in plain.named_parameters()}


def check(got: tuple[Tensor, Any], want: tuple[Tensor, Any]) -> None:
    """Losses and gradients are those of one process."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-6)
    for path, grad in got[1].items():
        torch.testing.assert_close(grad, want[1][path], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", ["ring", "heads", pytest.param("both", marks=pytest.mark.long)])
def test_a_llama_equals_one_process(layout: str, packed: bool) -> None:
    kind, sizes, names = LAYOUTS[layout]
    batch = {"input_ids": tokens(), "labels": tokens()} | ({"documents": DOCUMENTS} if packed else {})
    want, mesh = in_one_process(batch), fs.virtual_mesh(sizes, names)
    for (got,) in mesh.run(lambda: over_ranks(kind, mesh, [batch])):
        check(got, want)


def on_processes() -> list[tuple[Tensor, Any]]:
    """On a rank."""
    with fs.make_mesh((2,), ("cp",)) as mesh:
        return over_ranks("fshard_ring", mesh, [{"input_ids": tokens(), "labels": tokens()}])


@pytest.mark.slow
def test_a_llama_over_processes_equals_one_process(pool: Pools) -> None:
    want = in_one_process({"input_ids": tokens()})
    for (got,) in pool(2).run(on_processes):
        check(got, want)


@pytest.mark.parametrize("family", ["Qwen3", "GPT2", "Olmo2", "Phi3", "Mistral"])
def test_other_families(family: str) -> None:
    def loss(kind: str) -> tuple[Tensor, Tensor]:
        batch = parallel.context_batch(tokens(), tokens())
        logits = model(kind, family)(**batch).logits
        labels = batch["shift_labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), (labels >= 0).sum()

    mesh = fs.virtual_mesh((2,), ("cp",))

    def on_a_rank() -> tuple[Tensor, Tensor]:
        with c.use_mesh(mesh):
            return loss("fshard_ring")

    parts = mesh.run(on_a_rank)
    with c.use_mesh(fs.make_mesh((1,), ("cp",))):
        total, count = loss("eager")
    torch.testing.assert_close(sum(part for part, _ in parts), total)
    assert sum(int(part) for _, part in parts) == count


def test_attention_to_the_tokens_of_a_rank_alone_is_refused() -> None:
    """A model that was made without the attention that knows of the cut: its loss would be wrong."""
    mesh, split = fs.virtual_mesh((2,), ("cp",)), fs.split(model("sdpa"), units="auto")
    plan = fs.make_plan(split, mesh, [(".*", fs.fsdp("cp"))], batch=P(None, "cp"))
    step = fs.make_train_step(fs.causal_lm_loss(split, chunks=2), fs.optim.sgd(0.1), plan)
    state = fs.init_state(plan, fs.optim.sgd(0.1), params=split.params)
    with c.use_mesh(fs.make_mesh((1,), ("cp",))):
        rows = parallel.context_batch(tokens()[:, : TIME // 2], tokens()[:, : TIME // 2])
    with pytest.raises(fs.errors.PlanError, match=r"over the ranks of \('cp',\).*attn_implementation='fshard_ring'"):
        step(state, rows)


@pytest.mark.long
def test_a_llama_whose_layers_are_cut_too() -> None:
    """Its own tensor-parallel plan beside the ring: each rank has some heads, and keys of these go round."""
    mesh = fs.virtual_mesh((1, 2, 2), ("data", "cp", "tp"))
    cut = parallel.parallelize(fs.split(model("fshard_ring"), units="auto"), mesh)
    plan = fs.make_plan(cut, mesh, fs.suggest_rules(cut, mesh), batch=P("data", "cp"))
    both = fs.value_and_grad(fs.causal_lm_loss(cut, chunks=2), plan)

    def on_a_rank() -> tuple[Tensor, Any]:
        batch = parallel.context_batch(tokens(), tokens(), mesh=mesh)
        loss, grads = both(fs.shard(cut.params, plan), batch)
        return loss, dict(tree.paths(fs.unshard(grads, plan)))

    want = in_one_process({"input_ids": tokens()})
    for got in mesh.run(on_a_rank):
        check(got, want)


def test_attention_to_a_ranks_own_tokens_alone_is_found() -> None:
    """The fault is planted: the loss of local attention differs by far more than the tests above allow."""
    batch = {"input_ids": tokens(), "labels": tokens()}
    want, mesh = in_one_process(batch), fs.virtual_mesh((2,), ("cp",))

    def local(q: Tensor, k: Tensor, v: Tensor, *, axis: str, causal: bool, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    with patch.object(module, "ring_attention", local):
        ((loss, _),) = mesh.run(lambda: over_ranks("fshard_ring", mesh, [batch]))[0]
    assert abs(loss - want[0]) > 1e-4


def test_parts_have_the_positions_and_labels_of_whole_rows() -> None:
    """A document's last token has no label, and neither has padding."""
    ids, documents = torch.arange(10, 18)[None], torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]])
    mesh = fs.virtual_mesh((2,), ("cp",))
    for given, positions, labels in (
        (None, [0, 1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17, -100]),
        (documents, [0, 1, 2, 0, 1, 2, 0, 1], [11, 12, -100, 14, 15, -100, -100, -100]),
    ):
        parts = mesh.run(lambda given=given: parallel.context_batch(ids, ids, documents=given, mesh=mesh))
        whole = {name: parallel.unzigzag(torch.cat([part[name] for part in parts], 1), 2) for name in parts[0]}
        assert whole["input_ids"].tolist() == whole["labels"].tolist() == ids.tolist()
        assert whole["position_ids"].tolist() == [positions]
        assert whole["shift_labels"].tolist() == [labels]
        assert given is None or whole["documents"].tolist() == given.tolist()


def test_without_a_mesh_nothing_is_computed() -> None:
    """A registration does not fall back to a rank's own tokens."""
    with pytest.raises(fs.errors.AxisError, match="'cp'"):
        model("fshard_ring")(input_ids=tokens())


def test_no_step_sees_keys_of_another() -> None:
    """One model, one registration: each batch has the loss and gradients that it has alone, in any order."""
    mesh = fs.virtual_mesh((2,), ("cp",))
    batches = [{"input_ids": tokens(step), "labels": tokens(step)} for step in (0, 1, 0)]
    for first, second, again in mesh.run(lambda: over_ranks("fshard_ring", mesh, batches)):
        check(first, in_one_process(batches[0]))
        check(second, in_one_process(batches[1]))
        assert torch.equal(first[0], again[0])
        assert all(torch.equal(grad, again[1][path]) for path, grad in first[1].items())


def test_a_registration_over_another_axis_replaces_the_first() -> None:
    parallel.register_attention(axis="elsewhere")
    with c.use_mesh(fs.make_mesh((1,), ("cp",))), pytest.raises(fs.errors.AxisError, match="elsewhere"):
        model("fshard_ring")(input_ids=tokens())


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_seen_by_no_token(left: bool) -> None:
    mesh, mask = fs.virtual_mesh((2,), ("cp",)), torch.ones(2, TIME).long()
    mask[0, slice(0, 5) if left else slice(11, None)] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    # Eager attention adds to float64 scores what overflows.
    want = model("sdpa")(input_ids=tokens(), attention_mask=mask, position_ids=places).logits

    def on_a_rank() -> Tensor:
        with c.use_mesh(mesh):
            mine = [parallel.zigzag_slice(x) for x in (tokens(), mask, places)]
            return model("fshard_ring")(
                **dict(zip(("input_ids", "attention_mask", "position_ids"), mine, strict=True))
            ).logits

    got = parallel.unzigzag(torch.cat(mesh.run(on_a_rank), 1), 2)
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()])


def given(**changes: Any) -> dict[str, Any]:
    """Arguments of a model on a rank, with changes; None removes one."""
    batch = {**parallel.context_batch(tokens()), **changes}
    return {name: x for name, x in batch.items() if x is not None}


class Encoder(torch.nn.Module):
    """What the attention of an encoder shows of itself."""

    is_causal = False


def encoder(positions: Tensor) -> Tensor:
    """Whole attention, by the registered function."""
    heads = [torch.ones(1, 2, PART, 4)] * 3
    return module.ContextAttention("fshard_ring", ("cp",))(Encoder(), *heads, None, position_ids=positions)[0]


def test_an_encoder_may_have_any_cut() -> None:
    mesh = fs.virtual_mesh((2,), ("cp",))

    def on_a_rank() -> Tensor:
        with c.use_mesh(mesh):
            return encoder(torch.arange(PART)[None] + PART * c.axis_index("cp"))

    assert all(torch.allclose(part, torch.ones(1, PART, 2, 4)) for part in mesh.run(on_a_rank))


def cached() -> Any:
    """Keys of an earlier step."""
    return model("fshard_ring")(**given(), use_cache=True).past_key_values


PART = TIME // 2
BAD: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "positions of a rank's own tokens": (
        lambda: model("fshard_ring")(**given(position_ids=None)),
        (
            "LlamaAttention of layer 0",
            "16 tokens",
            "2 ranks of cp",
            "in row 0 token 3 has 3, and token 4 has 0",
            "context_batch",
        ),
    ),
    "positions of a sequence that is not dealt in zigzag": (
        lambda: model("fshard_ring")(
            **given(position_ids=torch.arange(PART)[None] + PART * c.axis_index("cp")),
        ),
        ("in row 0 token 3 has 3, and token 4 has 8",),
    ),
    "positions of three dims": (
        lambda: module.ContextAttention("fshard_ring", ("cp",))(
            torch.nn.Module(), *[torch.ones(1, 2, 8, 4)] * 3, None, position_ids=torch.zeros(3, 1, 8)
        ),
        ("fshard_ring in Module: position_ids=[3, 1, 8]", "not (1, 8)"),
    ),
    "positions that two tokens of an encoder have": (
        lambda: encoder(torch.arange(PART)[None]),
        ("fshard_ring in Encoder: position_ids do not follow the whole sequence of 16 tokens, cut over 2 ranks",),
    ),
    "documents of the whole sequence": (
        lambda: model("fshard_ring")(**given(documents=DOCUMENTS)),
        ("documents [2, 16] of 2 rows of 8 tokens on this rank must be [2, 8]",),
    ),
    "keys of an earlier step": (
        lambda: model("fshard_ring")(**given(), past_key_values=cached()),
        ("LlamaAttention of layer 0: 16 keys for 8 queries", "past_key_values"),
    ),
    "a mask of the whole sequence": (
        lambda: model("fshard_ring")(**given(attention_mask=torch.ones(2, TIME))),
        ("an attention mask [2, 16] for 2 rows of 8 tokens on this rank",),
    ),
    "a mask of four dims": (
        lambda: model("fshard_ring")(**given(attention_mask=torch.ones(2, 1, PART, PART))),
        ("an attention mask [2, 1, 8, 8] for 2 rows", "only masks of padding, [2, 8]"),
    ),
    "dropout": (
        lambda: model("fshard_ring", attention_dropout=0.1).train()(**given()),
        ("dropout=0.1 is not computed", "16 tokens"),
    ),
    "a sliding window": (
        lambda: model("fshard_ring", "Mistral", sliding_window=8)(**given()),
        ("sliding_window_overlay", "16 tokens"),
    ),
    "a softcap": (lambda: model("fshard_ring", "Gemma2", head_dim=8)(**given()), ("softcap=50.0",)),
    "sinks": (
        lambda: model("fshard_ring", "GptOss", layer_types=["full_attention"] * 2, head_dim=8)(**given()),
        ("s_aux=[4]",),
    ),
    "an argument that is not known": (
        lambda: model("fshard_ring")(**given(), cu_seq_lens_q=torch.tensor([0, 3, 8])),
        ("cu_seq_lens_q=[3] is not computed", "documents= keeps"),
    ),
    "heads that the axis does not divide": (
        lambda: model("fshard_ulysses", num_attention_heads=1, num_key_value_heads=1, head_dim=8)(**given()),
        ("1 heads in fshard_ulysses in LlamaAttention of layer 0 over the 2 ranks of axis 'cp'", "Choose 2"),
    ),
    "tokens that the axis does not divide": (
        lambda: model("fshard_ring")(input_ids=tokens()[:, :3], position_ids=torch.arange(3)[None]),
        ("LlamaAttention of layer 0: 3 tokens a rank on 2 ranks of axis 'cp'", "pad it to 8"),
    ),
    "layers that are no attention": (
        lambda: model("fshard_ring", "Lfm2", layer_types=["conv", "full_attention"])(**given()),
        ("Lfm2Attention of layer 1", "layers of ['conv']"),
    ),
    "labels of a part": (
        lambda: fs.causal_lm_loss(fs.split(model("fshard_ring"), units="auto"), chunks=1)(
            {}, {"input_ids": tokens()[:, :PART], "labels": tokens()[:, :PART]}
        ),
        ("labels [2, 8] are a part of the sequence", "shift_labels", "context_batch"),
    ),
    "one axis for the ring and for heads": (
        lambda: parallel.register_attention(axis="cp", heads="cp"),
        ("register_attention", "heads", "an axis other than 'cp'"),
    ),
    "axes that are no names": (
        lambda: parallel.register_attention(axis=("cp", "hp")),  # type: ignore[arg-type]
        ("register_attention", "axis", "the name of a mesh axis"),
    ),
    "rows of different shapes": (
        lambda: parallel.context_batch(tokens(), tokens()[:, 1:]),
        ("'input_ids': [2, 16], 'labels': [2, 15]", "(rows, time)"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_computed_is_refused_on_all_ranks(name: str) -> None:
    call, says = BAD[name]
    mesh = fs.virtual_mesh((2,), ("cp",))

    def on_a_rank() -> str:
        with c.use_mesh(mesh), pytest.raises(fs.errors.PlanError) as caught:
            call()
        return str(caught.value)

    ranks = mesh.run(on_a_rank)
    assert ranks[0] == ranks[1]
    assert not [part for part in says if part not in ranks[0]], ranks[0]


def test_a_window_that_is_as_long_as_the_sequence_is_none() -> None:
    mesh = fs.virtual_mesh((2,), ("cp",))
    want = model("eager", "Mistral", sliding_window=TIME)(input_ids=tokens()).logits

    def on_a_rank() -> Tensor:
        with c.use_mesh(mesh):
            return model("fshard_ring", "Mistral", sliding_window=TIME)(**given()).logits

    torch.testing.assert_close(parallel.unzigzag(torch.cat(mesh.run(on_a_rank), 1), 2), want)
