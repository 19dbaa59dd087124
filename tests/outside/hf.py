"""More models of Hugging Face transformers, tiny and with random weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.outside.case import LENGTH, ROWS, VOCAB, Batch, Outside, images, labels, words


def _hf(
    config: str, model: str, batch: Callable[[torch.Generator], Batch], options: dict[str, Any], **rest: Any
) -> Outside:
    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(_configured(config, options))
        assert isinstance(made, nn.Module)
        return made

    return Outside(model, make, batch, **rest)


def _configured(name: str, options: dict[str, Any]) -> Any:
    import transformers

    nested = {key: _configured(*value) if isinstance(value, tuple) else value for key, value in options.items()}
    return getattr(transformers, name)(**nested)


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


def large_images(generator: torch.Generator) -> Batch:
    """Pictures of 32 by 32 pixels."""
    return images(generator, 32)


def segments(generator: torch.Generator) -> Batch:
    """Pictures and the class of each pixel."""
    return images(generator, 32) | {"labels": torch.randint(5, (ROWS, 32, 32), generator=generator)}


def captions(generator: torch.Generator) -> Batch:
    """Pictures, and words behind the places that they take."""
    ids = torch.cat([torch.full((ROWS, 4), 2), words(generator)], 1)
    return {"pixel_values": images(generator)["pixel_values"], "input_ids": ids, "labels": ids}


def speech(generator: torch.Generator) -> Batch:
    """Waves and the sounds in them."""
    wave = torch.randn(ROWS, 400, generator=generator)
    return {"input_values": wave, "labels": torch.randint(1, 12, (ROWS, 5), generator=generator)}


def masked_images(generator: torch.Generator) -> Batch:
    """Pictures, and numbers by whose order patches are hidden."""
    return {"pixel_values": images(generator)["pixel_values"], "noise": torch.rand(ROWS, 16, generator=generator)}


def series(generator: torch.Generator) -> Batch:
    """A past and a future of numbers."""
    past = torch.randn(ROWS, 32, 2, generator=generator).cumsum(1)
    return {"past_values": past, "future_values": torch.randn(ROWS, 8, 2, generator=generator) + past[:, -1:]}


def detections(generator: torch.Generator) -> Batch:
    """Pictures, and a list of what is in each."""
    corners = torch.rand(ROWS, 2, 2, generator=generator) / 2 + 0.25
    boxes = torch.cat([corners, torch.rand(ROWS, 2, 2, generator=generator) / 4 + 0.1], -1)
    found = torch.randint(3, (ROWS, 2), generator=generator)
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator), "boxes": boxes, "found": found}


def detected(batch: Batch) -> Batch:
    """What is in each picture, as detectors of ``transformers`` take it."""
    pairs = zip(batch["found"].unbind(), batch["boxes"].unbind(), strict=True)
    labels = [{"class_labels": found, "boxes": boxes} for found, boxes in pairs]
    return {"pixel_values": batch["pixel_values"], "labels": labels}


DECODER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
ENCODER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
ENCODER |= {"num_attention_heads": 4, "max_position_embeddings": 64}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SEEING = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SEEING |= {"image_size": 16, "patch_size": 4}
RESNET = ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"})

TRANSFORMERS: dict[str, Outside] = {
    "Llama 4": _hf(
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        language,
        DECODER
        | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
        | {"interleave_moe_layer_step": 2, "no_rope_layer_interval": 3, "attention_chunk_size": 4, "pad_token_id": 0},
        extra={"use_cache": False},
    ),
    "DeBERTa": _hf(
        "DebertaConfig",
        "DebertaForSequenceClassification",
        classes,
        ENCODER | STILL | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "num_labels": 3},
    ),
    "Reformer": _hf(
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
    "LLaVA": _hf(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        captions,
        {
            "vision_config": ("CLIPVisionConfig", SEEING | {"patch_size": 8}),
            "text_config": ("LlamaConfig", DECODER),
            "image_token_index": 2,
            "vision_feature_layer": -2,
        },
        extra={"use_cache": False},
    ),
    "Segformer": _hf(
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        segments,
        {"num_encoder_blocks": 2, "depths": [1, 2], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3]}
        | {"strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
        | STILL
        | {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0, "num_labels": 5},
        parts=True,
        buffers=True,
    ),
    "EfficientNet of transformers": _hf(
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        large_images,
        {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 1.0, "depth_divisor": 4, "hidden_dim": 320}
        | {"kernel_sizes": [3, 3, 5], "in_channels": [32, 16, 24], "out_channels": [16, 24, 24], "strides": [1, 2, 1]}
        | {"num_block_repeats": [1, 1, 2], "expand_ratios": [1, 2, 2], "depthwise_padding": [], "num_labels": 5}
        | {"drop_connect_rate": 0.0, "dropout_rate": 0.0},
        parts=True,
        buffers=True,
    ),
    "Llama, a loss of its hidden states": _hf(
        "LlamaConfig",
        "LlamaForCausalLM",
        language,
        DECODER,
        loss=lambda out: out.loss + sum(state.square().mean() for state in out.hidden_states) / 10,
        extra={"use_cache": False, "output_hidden_states": True},
    ),
    "FNet": _hf(
        "FNetConfig",
        "FNetForMaskedLM",
        language,
        {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
        | {"hidden_dropout_prob": 0.0, "max_position_embeddings": 32, "tpu_short_seq_length": 8},
    ),
    "Wav2Vec 2": _hf(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        speech,
        {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        | {"hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0, "feat_proj_dropout": 0.0}
        | {"final_dropout": 0.0, "layerdrop": 0.0, "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8]}
        | {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}
        | {"ctc_loss_reduction": "mean", "feat_extract_norm": "layer", "pad_token_id": 0},
    ),
    "ResNet": _hf(
        RESNET[0], "ResNetForImageClassification", large_images, RESNET[1] | {"num_labels": 5}, parts=True, buffers=True
    ),
    "Swin v2": _hf(
        "Swinv2Config",
        "Swinv2ForImageClassification",
        large_images,
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
        | STILL
        | {"drop_path_rate": 0.0, "num_labels": 5},
    ),
    "ConvNeXt v2": _hf(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        large_images,
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "drop_path_rate": 0.0, "num_labels": 5},
    ),
    "ViT-MAE": _hf(
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        masked_images,
        SEEING
        | STILL
        | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
        | {"decoder_intermediate_size": 24},
    ),
    "Switch Transformers": _hf(
        "SwitchTransformersConfig",
        "SwitchTransformersForConditionalGeneration",
        translation,
        {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2}
        | {"num_heads": 4, "num_experts": 3, "expert_capacity": 64, "dropout_rate": 0.0, "router_jitter_noise": 0.0}
        | {"decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        parts=True,
        extra={"output_router_logits": True, "use_cache": False},
    ),
    "DeepSeek-V3": _hf(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        language,
        DECODER
        | {"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        | {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1},
        extra={"use_cache": False},
    ),
    "RWKV": _hf(
        "RwkvConfig",
        "RwkvForCausalLM",
        language,
        {"vocab_size": VOCAB, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3}
        | {"intermediate_size": 48, "context_length": 32},
        extra={"use_cache": False},
    ),
    "Mamba 2": _hf(
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
    "Zamba 2": _hf(
        "Zamba2Config",
        "Zamba2ForCausalLM",
        language,
        DECODER
        | {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 4}
        | {"n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 4, "num_mem_blocks": 1, "adapter_rank": 4}
        | {"use_shared_attention_adapter": False, "num_key_value_heads": 4},
        extra={"use_cache": False},
    ),
    "ALBERT": _hf(
        "AlbertConfig",
        "AlbertForSequenceClassification",
        classes,
        ENCODER
        | STILL
        | {"embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 2, "num_labels": 3}
        | {"classifier_dropout_prob": 0.0},
        units=("albert.encoder.albert_layer_groups.*",),
    ),
    "BLOOM": _hf(
        "BloomConfig",
        "BloomForCausalLM",
        language,
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4},
        extra={"use_cache": False},
    ),
    "XLNet": _hf(
        "XLNetConfig",
        "XLNetLMHeadModel",
        language,
        {"vocab_size": VOCAB, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48, "dropout": 0.0},
        extra={"use_mems": False},
    ),
    "Perceiver": _hf(
        "PerceiverConfig",
        "PerceiverForMaskedLM",
        language,
        {"vocab_size": VOCAB, "num_latents": 6, "d_latents": 16, "d_model": 16, "num_blocks": 2}
        | {"num_self_attends_per_block": 2, "num_self_attention_heads": 2, "num_cross_attention_heads": 2}
        | {"qk_channels": 16, "v_channels": 16, "max_position_embeddings": LENGTH, "attention_probs_dropout_prob": 0.0},
    ),
    "Longformer": _hf(
        "LongformerConfig",
        "LongformerForMaskedLM",
        language,
        ENCODER | STILL | {"attention_window": 4, "pad_token_id": 1},
    ),
    "PatchTST": _hf(
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        series,
        {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "num_hidden_layers": 2}
        | {"d_model": 16, "num_attention_heads": 2, "ffn_dim": 24, "prediction_length": 8, "attention_dropout": 0.0}
        | {"ff_dropout": 0.0, "head_dropout": 0.0, "norm_type": "batchnorm", "loss": "mse"},
        parts=True,
        buffers=True,
    ),
    "DETR": _hf(
        "DetrConfig",
        "DetrForObjectDetection",
        detections,
        {"backbone_config": (RESNET[0], RESNET[1] | {"out_features": ["stage2"]}), "use_timm_backbone": False}
        | {"use_pretrained_backbone": False, "backbone": None, "num_queries": 4, "d_model": 16, "encoder_layers": 2}
        | {"decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
        | {"decoder_ffn_dim": 24, "dropout": 0.0, "num_labels": 3, "auxiliary_loss": True},
        given=detected,
    ),
}
