"""Models of words in Hugging Face transformers, tiny and with random weights."""

import torch

from tests.outside.case import LENGTH, ROWS, VOCAB, Batch, Outside, labels, words
from tests.outside.config import DECODER, ENCODER, STILL, hf


def language(generator: torch.Generator) -> Batch:
    """Words to predict."""
    ids = words(generator)
    return {"input_ids": ids, "labels": ids}


def long_language(generator: torch.Generator) -> Batch:
    """More of them."""
    ids = words(generator, 32)
    return {"input_ids": ids, "labels": ids}


def classes(generator: torch.Generator) -> Batch:
    """Words of which some are padding, and the class of the row."""
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, LENGTH - 2, LENGTH, LENGTH - 3] * 2)[:, None]).long()
    return {"input_ids": words(generator), "attention_mask": mask} | labels(generator, 3)


def translation(generator: torch.Generator) -> Batch:
    """Words and others that they become."""
    return {"input_ids": words(generator), "labels": words(generator, LENGTH - 2)}


def prefixed(generator: torch.Generator) -> Batch:
    """Words, and the keys and values of a prefix for three layers."""
    states = torch.randn(ROWS, 3, 2, 2, 3, 8, generator=generator)
    return language(generator) | {"states": states}


def cached(batch: Batch) -> Batch:
    """The prefix in a cache, as decoders of ``transformers`` take it."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for number, layer in enumerate(batch["states"].unbind(1)):
        cache.update(layer[:, 0], layer[:, 1], number)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], "past_key_values": cache}


LANGUAGE: dict[str, Outside] = {
    "Llama 4": hf(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        language,
        DECODER
        | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
        | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 4, "pad_token_id": 0},
        extra={"use_cache": False},
    ),
    "DeBERTa": hf(
        "DebertaConfig",
        "DebertaForSequenceClassification",
        classes,
        ENCODER | STILL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "num_labels": 3},
    ),
    "Reformer": hf(
        "ReformerConfig",
        "ReformerModelWithLMHead",
        long_language,
        {"vocab_size": VOCAB, "hidden_size": 32, "feed_forward_size": 48, "num_attention_heads": 2}
        | {"attention_head_size": 16, "attn_layers": ["local", "lsh", "local"], "is_decoder": True, "use_cache": False}
        | {"axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 16], "max_position_embeddings": 32}
        | {"num_buckets": 4, "hash_seed": 5, "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8}
        | {"hidden_dropout_prob": 0.0, "lsh_attention_probs_dropout_prob": 0.0}
        | {"local_attention_probs_dropout_prob": 0.0},
        units=("reformer.encoder.layers.*",),
    ),
    "Llama, a loss of its hidden states": hf(
        "LlamaConfig",
        "LlamaForCausalLM",
        language,
        DECODER,
        loss=lambda out: out.loss + sum(state.square().mean() for state in out.hidden_states) / 10,
        extra={"use_cache": False, "output_hidden_states": True},
    ),
    "FNet": hf(
        "FNetConfig",
        "FNetForMaskedLM",
        language,
        {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        | {"hidden_dropout_prob": 0.0, "max_position_embeddings": 32, "tpu_short_seq_length": 8},
    ),
    "Switch Transformers": hf(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        translation,
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
        | {"num_heads": 4, "num_experts": 3, "expert_capacity": 64, "dropout_rate": 0.0, "router_jitter_noise": 0.0}
        | {"decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        parts=True,
        extra={"output_router_logits": True, "use_cache": False},
    ),
    "DeepSeek-V3": hf(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        language,
        DECODER
        | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1},
        extra={"use_cache": False},
    ),
    "RWKV": hf(
        "RwkvConfig",
        "RwkvForCausalLM",
        language,
        {"vocab_size": VOCAB, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3}
        | {"intermediate_size": 48, "context_length": 32},
        extra={"use_cache": False},
    ),
    "Mamba 2": hf(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        language,
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "state_size": 4,
            "num_hidden_layers": 3,
            "num_heads": 4,
            "head_dim": 16,
        }
        | {"n_groups": 2, "chunk_size": 4},
        extra={"use_cache": False},
    ),
    "Zamba 2": hf(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        language,
        DECODER
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 4}
        | {"n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1, "adapter_rank": 4}
        | {"use_shared_attention_adapter": False, "num_key_value_heads": 4},
        extra={"use_cache": False},
    ),
    "ALBERT": hf(
        "AlbertConfig",
        "AlbertForSequenceClassification",
        classes,
        ENCODER
        | STILL
        | {"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 2, "num_labels": 3}
        | {"classifier_dropout_prob": 0.0},
        units=("albert.encoder.albert_layer_groups.*",),
    ),
    "BLOOM": hf(
        "BloomConfig",
        "BloomForCausalLM",
        language,
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        extra={"use_cache": False},
    ),
    "XLNet": hf(
        "XLNetConfig",
        "XLNetLMHeadModel",
        language,
        {"vocab_size": VOCAB, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "dropout": 0.0},
        extra={"use_mems": False},
    ),
    "Perceiver": hf(
        "PerceiverConfig",
        "PerceiverForMaskedLM",
        language,
        {"vocab_size": VOCAB, "num_latents": 6, "d_latents": 16, "d_model": 16, "num_blocks": 2}
        | {"num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
        | {"qk_channels": 16, "v_channels": 16, "max_position_embeddings": LENGTH, "attention_probs_dropout_prob": 0.0},
    ),
    "Longformer": hf(
        "LongformerConfig",
        "LongformerForMaskedLM",
        language,
        ENCODER | STILL | {"attention_window": 4, "pad_token_id": 1},
    ),
    "Llama, a prefix in a cache": hf(
        "LlamaConfig", "LlamaForCausalLM", prefixed, DECODER, given=cached, extra={"use_cache": True}
    ),
    "OLMoE": hf(
        "OlmoeConfig",
        "OlmoeForCausalLM",
        language,
        DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
        parts=True,
        extra={"use_cache": False, "output_router_logits": True},
    ),
    "Gemma 3n": hf(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        language,
        DECODER
        | {"head_dim": 8, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "sliding_window": 4}
        | {"num_kv_shared_layers": 1, "altup_num_inputs": 2, "laurel_rank": 4, "pad_token_id": 0}
        | {"activation_sparsity_pattern": [0.9, 0.0, 0.0]}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        extra={"use_cache": False},
    ),
    "xLSTM": hf(
        "xLSTMConfig",
        "xLSTMForCausalLM",
        long_language,
        {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 2}
        | {"chunk_size": 16, "qk_dim_factor": 0.5},
        extra={"use_cache": False},
    ),
}
