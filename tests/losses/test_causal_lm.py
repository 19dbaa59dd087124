"""fs.causal_lm_loss: models of transformers have the loss and gradients of their own whole logits."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import tree
from fshard.errors import PlanError
from tests.losses.plain import most_rows

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.long  # transformers takes seconds to import

VOCAB = 61
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "vocab_size": VOCAB, "num_key_value_heads": 2}
CALM = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, **CALM}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "tied LlamaForCausalLM": ("LlamaConfig", {**LLAMA, "tie_word_embeddings": True}),
    "MistralForCausalLM": ("MistralConfig", LLAMA),
    "Qwen2ForCausalLM": ("Qwen2Config", LLAMA),
    "Qwen3ForCausalLM": ("Qwen3Config", {**LLAMA, "head_dim": 8}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**LLAMA, "head_dim": 8, "final_logit_softcapping": 0.5}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
}


def made(name: str, units: Any = "auto") -> fs.Model:
    """A tiny model with random weights."""
    config, options = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, name.split()[-1])
    return fs.split(kind(getattr(transformers, config)(**options)).train(), units=units)


def batch(rows: int = 4) -> dict[str, Tensor]:
    """Tokens of which some are padding and some labels are ignored."""
    words = torch.randint(VOCAB, (rows, 16), generator=torch.Generator().manual_seed(1))
    labels, mask = words.clone(), torch.ones_like(words)
    labels[0, 3:], mask[0, 12:] = -100, 0
    return {"input_ids": words, "labels": labels, "attention_mask": mask}


def gradients(loss: Any, params: Any) -> tuple[float, dict[str, Tensor]]:
    """A loss and its gradients by path."""
    flat = {path: leaf.detach().clone().requires_grad_() for path, leaf in tree.paths(params)}
    found = loss(tree.nest(flat), batch())
    found = found.value if isinstance(found, fs.Mean) else found
    grads = torch.autograd.grad(found, [*flat.values()])
    return float(found.detach()), dict(zip(flat, grads, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_model(name: str) -> None:
    model = made(name)
    want, theirs = gradients(lambda p, b: model.apply(p, **b, use_cache=False).loss, model.params)
    with most_rows(VOCAB) as most:
        got, mine = gradients(fs.causal_lm_loss(model, chunks=2), model.params)
    assert most() == 4 * 16 // 2
    assert got == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_head_with_adapters() -> None:
    model = fs.lora.wrap(made("LlamaForCausalLM"), [r"lm_head\.weight", r".*q_proj\.weight"], rank=2)
    params = tree.mapped(lambda leaf: leaf.detach() + 0.1, model.params)  # the second adapter is zero at first
    want, theirs = gradients(lambda p, b: model.apply(p, **b, use_cache=False).loss, params)
    got, mine = gradients(fs.causal_lm_loss(model, chunks=4), params)
    assert got == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"remat": "all"}, {"compile": "fx"}], ids=str)
def test_two_ranks_train_as_one_process_with_whole_logits(options: dict[str, Any]) -> None:
    model, mesh, whole = made("tied LlamaForCausalLM"), fs.virtual_mesh((2,), ("data",)), batch()

    def trained(mesh: Any, loss: Any, given: dict[str, Tensor], **options: Any) -> list[float]:
        plan = fs.make_plan(model, mesh, [(".*", fs.fsdp("data"))], batch=fs.P("data"))
        opt = fs.optim.sgd(0.5)
        step, state = fs.make_train_step(loss, opt, plan, **options), fs.init_state(plan, opt, params=model.params)
        losses = []
        for _ in range(3):
            state, metrics = step(state, given)
            losses.append(float(metrics.loss))
        return losses

    own = lambda p, b: model.apply(p, **b, use_cache=False).loss  # noqa: E731
    want = trained(fs.make_mesh((1,), ("data",)), own, whole)
    chunked = fs.causal_lm_loss(model, chunks=8)
    mine = lambda: {name: each[2 * mesh.rank :][:2] for name, each in whole.items()}  # noqa: E731
    for losses in mesh.run(lambda: trained(mesh, chunked, mine(), **options)):
        assert losses == pytest.approx(want, rel=1e-5)


def test_models_that_are_not_known() -> None:
    with pytest.raises(PlanError, match=r"Linear is none of transformers' LlamaForCausalLM, .*lm_head"):
        fs.causal_lm_loss(fs.split(nn.Linear(2, 2)), chunks=2)
    with pytest.raises(PlanError, match="'lm_head' is a unit, whose weight only its own call may read"):
        fs.causal_lm_loss(made("LlamaForCausalLM", units=("lm_head",)), chunks=2)
    module = made("LlamaForCausalLM").module
    module.lm_head = nn.Sequential(nn.Linear(32, VOCAB))
    with pytest.raises(PlanError, match="looked for 'model', a module, and 'lm_head', an nn.Linear without hooks"):
        fs.causal_lm_loss(fs.split(module), chunks=2)
    with pytest.raises(PlanError, match="model is a LlamaForCausalLM: give what fs.split"):
        fs.causal_lm_loss(module, chunks=2)


def test_batches_without_labels() -> None:
    model = made("LlamaForCausalLM")
    says = re.escape("a batch with the keys ['input_ids']: give a mapping with labels, a tensor (rows, tokens)")
    with pytest.raises(PlanError, match=says):
        fs.causal_lm_loss(model, chunks=2)(model.params, {"input_ids": torch.zeros(2, 3, dtype=torch.long)})
