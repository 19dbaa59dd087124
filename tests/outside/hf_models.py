"""Models of Hugging Face transformers, tiny and with random weights: programs that nobody here wrote.

Each is built from a configuration, without any download. ``transformers`` is imported where a model is built, since
that takes seconds.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, VOCAB = 4, 8, 61
Batch = dict[str, Any]


def own(out: Any) -> Tensor:
    """What the model itself takes for its loss."""
    assert isinstance(out.loss, Tensor)
    return out.loss


def likeness(out: Any) -> Tensor:
    """A loss of pairs that, unlike CLIP's own, does not depend on which pairs are on the same rank."""
    assert isinstance(out.image_embeds, Tensor)
    return 1 - (out.image_embeds * out.text_embeds).sum(-1).mean()


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        config: the name of its configuration's class.
        model: the name of its class.
        options: of the configuration.
        batch: what it is called with at a step, for all ranks together.
        units: as for ``fs.split``.
        experts: the way in which experts compute, as ``transformers`` names it.
        loss: of what the model returns; a mean over the batch's rows.
        cached: whether the model makes a cache of keys and values, unless it is told not to.
    """

    config: str
    model: str
    options: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    units: Any = "auto"
    experts: str = ""
    loss: Callable[[Any], Tensor] = own
    cached: bool = True

    def build(self) -> nn.Module:
        """The module in training mode; with the same values in every process."""
        import transformers

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            made = getattr(transformers, self.model)(getattr(transformers, self.config)(**self.options))
        if self.experts:
            made.set_experts_implementation(self.experts)
        assert isinstance(made, nn.Module)
        return made.train()

    def at(self, step: int) -> Batch:
        """The global batch of a step."""
        return self.batch(torch.Generator().manual_seed(100 + step))


def _words(generator: torch.Generator, rows: int = ROWS, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=generator)


def _language(generator: torch.Generator) -> Batch:
    words = _words(generator)
    return {"input_ids": words, "labels": words}


def _padded(generator: torch.Generator) -> Batch:
    """The last tokens of some rows are padding, which the mask says; the loss counts them, so all rows count alike."""
    words = _words(generator)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 2], [LENGTH], [LENGTH - 3]])).long()
    return {"input_ids": words, "attention_mask": mask, "labels": words}


def _classes(generator: torch.Generator) -> Batch:
    return {**_padded(generator), "labels": torch.randint(3, (ROWS,), generator=generator)}


def _translation(generator: torch.Generator) -> Batch:
    return {**_padded(generator), "labels": _words(generator, length=LENGTH - 2)}


def _images(generator: torch.Generator) -> Batch:
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(5, (ROWS,), generator=generator)}


def _speech(generator: torch.Generator) -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 32, generator=generator), "labels": _words(generator)}


_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
_ENCODER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
_ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 32}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

CASES: dict[str, Case] = {
    "Llama": Case("LlamaConfig", "LlamaForCausalLM", _DECODER, _padded),
    "GPT-2": Case(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        _padded,
    ),
    "Mixtral": Case(
        "MixtralConfig", "MixtralForCausalLM", _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2}, _language
    ),
    "T5": Case(
        "T5Config",
        "T5ForConditionalGeneration",
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        _translation,
    ),
    "BERT": Case(
        "BertConfig", "BertForSequenceClassification", _ENCODER | _STILL | {"num_labels": 3}, _classes, cached=False
    ),
    "ViT": Case(
        "ViTConfig",
        "ViTForImageClassification",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        | _STILL
        | {"image_size": 16, "patch_size": 4, "num_labels": 5},
        _images,
        cached=False,
    ),  # fmt: skip
    "Whisper": Case(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {"vocab_size": VOCAB, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"max_source_positions": 16, "max_target_positions": 16, "dropout": 0.0, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        _speech,
    ),
    "Mamba": Case(
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 3},
        _language,
    ),
    "Qwen2": Case("Qwen2Config", "Qwen2ForCausalLM", _DECODER, _padded),
    "Gemma 2": Case("Gemma2Config", "Gemma2ForCausalLM", _DECODER | {"head_dim": 8, "sliding_window": 4}, _padded),
    "Qwen3-MoE": Case(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _DECODER | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        _language,
    ),
    "OPT": Case(
        "OPTConfig",
        "OPTForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
        | {"max_position_embeddings": 32, "word_embed_proj_dim": 32, "dropout": 0.0},
        _padded,
    ),
    "DeBERTa-v2": Case(
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        _ENCODER | _STILL | {"num_labels": 3},
        _classes,
        cached=False,
    ),
    "CLIP": Case(
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**_ENCODER, "projection_dim": 16, "eos_token_id": 2},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "image_size": 16,
                "patch_size": 4,
                "projection_dim": 16,
            },
            "projection_dim": 16,
        },
        lambda generator: {"pixel_values": _images(generator)["pixel_values"], "input_ids": _words(generator)},
        loss=likeness,
        cached=False,
    ),  # fmt: skip
}

CASES["Mixtral, a loop over experts"] = replace(CASES["Mixtral"], experts="eager")
CASES["Mixtral, experts in one batched product"] = replace(CASES["Mixtral"], experts="batched_mm")
CASES["T5, encoder and decoder as units"] = replace(CASES["T5"], units=("encoder", "decoder"))
CASES["CLIP, both models as units"] = replace(CASES["CLIP"], units=("*_model",))
