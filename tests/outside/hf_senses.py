"""Models of pictures, sounds and series in Hugging Face transformers, tiny and with random weights."""

import torch

from tests.outside.case import ROWS, Batch, Outside, images, labels, words
from tests.outside.config import DECODER, RESNET, SEEING, STILL, hf


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


def spoken(generator: torch.Generator) -> Batch:
    """Waves and what they are."""
    return {"input_values": torch.randn(ROWS, 400, generator=generator)} | labels(generator, 3)


def pointed(generator: torch.Generator) -> Batch:
    """Pictures and a point in each."""
    points = torch.rand(ROWS, 1, 1, 2, generator=generator) * 32
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator), "input_points": points}


LISTENING = {"vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LISTENING |= {"intermediate_size": 48, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0}
LISTENING |= {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "conv_dim": [8, 8]}
LISTENING |= {"conv_stride": [5, 4], "conv_kernel": [10, 8], "num_conv_pos_embeddings": 4}
LISTENING |= {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}

SENSES: dict[str, Outside] = {
    "LLaVA": hf(
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
    "Segformer": hf(
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
    "EfficientNet of transformers": hf(
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
    "Wav2Vec 2": hf(
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        speech,
        LISTENING | {"ctc_loss_reduction": "mean", "feat_extract_norm": "layer", "pad_token_id": 0},
    ),
    "ResNet": hf(
        RESNET[0], "ResNetForImageClassification", large_images, RESNET[1] | {"num_labels": 5}, parts=True, buffers=True
    ),
    "Swin v2": hf(
        "Swinv2Config",
        "Swinv2ForImageClassification",
        large_images,
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
        | STILL
        | {"drop_path_rate": 0.0, "num_labels": 5},
    ),
    "ConvNeXt v2": hf(
        "ConvNextV2Config",
        "ConvNextV2ForImageClassification",
        large_images,
        {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "drop_path_rate": 0.0, "num_labels": 5},
    ),
    "ViT-MAE": hf(
        "ViTMAEConfig",
        "ViTMAEForPreTraining",
        masked_images,
        SEEING
        | STILL
        | {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2}
        | {"decoder_intermediate_size": 24},
    ),
    "PatchTST": hf(
        "PatchTSTConfig",
        "PatchTSTForPrediction",
        series,
        {"num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "num_hidden_layers": 2}
        | {"d_model": 16, "num_attention_heads": 2, "ffn_dim": 24, "prediction_length": 8, "attention_dropout": 0.0}
        | {"ff_dropout": 0.0, "head_dropout": 0.0, "norm_type": "batchnorm", "loss": "mse"},
        parts=True,
        buffers=True,
    ),
    "DETR": hf(
        "DetrConfig",
        "DetrForObjectDetection",
        detections,
        {"backbone_config": (RESNET[0], RESNET[1] | {"out_features": ["stage2"]}), "use_timm_backbone": False}
        | {"use_pretrained_backbone": False, "backbone": None, "num_queries": 4, "d_model": 16, "encoder_layers": 2}
        | {"decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24}
        | {"decoder_ffn_dim": 24, "dropout": 0.0, "num_labels": 3, "auxiliary_loss": True},
        given=detected,
    ),
    "HuBERT": hf(
        "HubertConfig",
        "HubertForSequenceClassification",
        spoken,
        LISTENING | {"use_weighted_layer_sum": True, "num_labels": 3},
    ),
    "Encodec": hf(
        "EncodecConfig",
        "EncodecModel",
        lambda generator: {"input_values": torch.randn(ROWS, 1, 320, generator=generator)},
        {"num_filters": 4, "hidden_size": 8, "num_residual_layers": 1, "upsampling_ratios": [4, 2], "codebook_dim": 8}
        | {"num_lstm_layers": 1, "codebook_size": 8, "target_bandwidths": [1.5, 3.0], "sampling_rate": 1600},
        loss=lambda out: out.audio_values.square().mean(),
    ),
    "DPT": hf(
        "DPTConfig",
        "DPTForDepthEstimation",
        lambda generator: {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator)},
        SEEING
        | STILL
        | {"image_size": 32, "patch_size": 8, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]}
        | {"neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8, "is_hybrid": False, "readout_type": "project"},
        loss=lambda out: (out.predicted_depth - 1).square().mean(),
    ),
    "SAM": hf(
        "SamConfig",
        "SamModel",
        pointed,
        {
            "vision_config": (
                "SamVisionConfig",
                {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
                | {"window_size": 2, "global_attn_indexes": [1], "output_channels": 16, "mlp_dim": 24}
                | {"num_pos_feats": 8},
            ),
            "prompt_encoder_config": (
                "SamPromptEncoderConfig",
                {"hidden_size": 16, "image_size": 32, "patch_size": 8, "mask_input_channels": 4},
            ),
            "mask_decoder_config": (
                "SamMaskDecoderConfig",
                {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 24}
                | {"iou_head_hidden_dim": 16},
            ),
        },
        loss=lambda out: out.pred_masks.square().mean() + out.iou_scores.mean(),
    ),
}
