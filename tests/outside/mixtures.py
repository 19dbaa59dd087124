"""Mixtures of experts and hybrids of Hugging Face transformers, tiny and with random weights."""

from typing import Any

import torch
from torch import nn

from tests.outside.case import VOCAB

SMALL = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "sliding_window": 4},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_chunk_size": 4, "num_dense_layers": 1},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2},
    **{"moe_num_experts": 4, "moe_k": 2, "moe_top_k": 2, "moe_intermediate_size": 16, "expert_ffn_hidden_size": 16},
    **{"shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "ffn_hidden_size": 48, "num_layers": 2},
    **{"moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"n_shared_experts": 1, "num_shared_experts": 1, "zero_expert_num": 1, "moe_layer_start_index": 1},
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "intermediate_size_mlp": 48, "num_heads": 4},
    **{"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_ssm": 64, "n_mamba_heads": 2, "use_mamba_kernels": False},
    **{"state_size": 4, "ssm_state_size": 4, "conv_kernel": 4, "chunk_size": 4, "n_groups": 1, "lru_width": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"attention_window_size": 4, "mlp_hidden_size": 32},
}
"""Sizes, of which a configuration takes those that it has."""

MIXTURES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {},
    "AriaTextForCausalLM": {},
    "BailingHybridForCausalLM": {},
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "Cohere2MoeForCausalLM": {},
    "DeepseekV2ForCausalLM": {},
    "DeepseekV3ForCausalLM": {},
    "DeepseekV32ForCausalLM": {},
    "Dots1ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": {},
    "ExaoneMoeForCausalLM": {},
    "FalconH1ForCausalLM": {},
    "FalconMambaForCausalLM": {},
    "FlexOlmoForCausalLM": {},
    "Glm4MoeForCausalLM": {},
    "Glm4MoeLiteForCausalLM": {},
    "GlmMoeDsaForCausalLM": {},
    "GptOssForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"layers_block_type": ["linear_attention", "attention"] * 2},
    "GraniteMoeSharedForCausalLM": {},
    "HYV3ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {},
    "JambaForCausalLM": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 2, "expert_layer_offset": 1},
    },
    "JetMoeForCausalLM": {},
    "KimiLinearForCausalLM": {},
    "LagunaForCausalLM": {},
    "Lfm2ForCausalLM": {},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashForCausalLM": {"head_dim": 4},
    "MambaForCausalLM": {},
    "Mamba2ForCausalLM": {"head_dim": 16},
    "MiMoV2FlashForCausalLM": {},
    "MiniMaxForCausalLM": {},
    "MiniMaxM2ForCausalLM": {},
    "Mistral4ForCausalLM": {},
    "MixtralForCausalLM": {},
    "NemotronHForCausalLM": {},
    "OlmoHybridForCausalLM": {},
    "OlmoeForCausalLM": {},
    "PhimoeForCausalLM": {},
    "Qwen2MoeForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "Qwen3NextForCausalLM": {},
    "Qwen3_5MoeForCausalLM": {},
    "RecurrentGemmaForCausalLM": {},
    "SolarOpenForCausalLM": {},
    "ZambaForCausalLM": {},
    "Zamba2ForCausalLM": {},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Options of each model's configuration, beside the sizes."""


def mixture(name: str) -> nn.Module:
    """A module with the same values in every process."""
    import transformers

    kind = getattr(transformers, name)
    config = kind.config_class
    sizes = {key: value for key, value in SMALL.items() if _settable(config, key)}
    if "qk_rope_head_dim" in sizes:
        sizes |= {"num_key_value_heads": 4}
        sizes.pop("head_dim", None)
    sizes |= MIXTURES[name]
    for key in ("layer_types", "layers_block_type", "mlp_layer_types"):
        held = getattr(config(), key) if key not in sizes and _settable(config, key) else None
        if isinstance(held, list | tuple):
            sizes[key] = (list(dict.fromkeys(held)) * 4)[:4]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = kind(config(**sizes))
    assert isinstance(made, nn.Module)
    return made


def _settable(config: type, key: str) -> bool:
    """Whether a configuration has an attribute that is no property of others."""
    key = getattr(config, "attribute_map", {}).get(key, key)
    known = getattr(config, key, None)
    return hasattr(config(), key) and not (isinstance(known, property) and known.fset is None)
