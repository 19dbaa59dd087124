"""``fshard plan --hf``: models that read text, pictures or sounds are fed; what is wrong with a file is said."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli.main import main
from fshard.errors import PlanError
from fshard.foresight.huggingface import hugging_face

pytestmark = pytest.mark.long  # transformers takes seconds to import

BODY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**BODY, "vocab_size": 64, "max_position_embeddings": 32}
BOTH = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
SPEECH = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
          (("layers", 1), ("attention_heads", 2), ("ffn_dim", 64))}  # fmt: skip
PICTURE = {**BODY, "image_size": 32, "patch_size": 8}

MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "no class": ({"model_type": "llama", **TEXT}, "LlamaForCausalLM of "),
    "a class of its own": (
        {"model_type": "llama", **TEXT, "architectures": ["MyLlama"]},
        "LlamaForCausalLM of FILE (transformers has no model MyLlama), given input_ids int64 [2, 32]",
    ),
    "no loss": (
        {"model_type": "bert", **TEXT, "architectures": ["BertModel"]},
        "; its loss: the mean square of what it returns first",
    ),
    "a label a row": (
        {"model_type": "bert", **TEXT, "architectures": ["BertForSequenceClassification"]},
        "input_ids int64 [2, 32], labels int64 [2]",
    ),
    "encoder and decoder": (
        {"model_type": "t5", **BOTH, "architectures": ["T5ForConditionalGeneration"]},
        "decoder_input_ids int64 [2, 8192]",
    ),
    "pictures": (
        {"model_type": "vit", **PICTURE, "architectures": ["ViTForImageClassification"]},
        "pixel_values bfloat16 [2, 3, 32, 32], labels int64 [2]",
    ),
    "pictures and texts": (
        {"model_type": "clip", "text_config": TEXT, "vision_config": PICTURE, "architectures": ["CLIPModel"]},
        "input_ids int64 [2, 32], pixel_values bfloat16 [2, 3, 32, 32]",
    ),
    "speech": (
        {
            "model_type": "whisper",
            "d_model": 32,
            **SPEECH,
            "vocab_size": 64,
            "max_source_positions": 20,
            "max_target_positions": 16,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
            "architectures": ["WhisperForConditionalGeneration"],
        },
        "input_features bfloat16 [2, 80, 40], decoder_input_ids int64 [2, 16], labels int64 [2, 16]",
    ),
    "a number that JSON lacks": (
        {
            **{"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 8},
            **{"num_heads": 4, "head_dim": 16, "n_groups": 2, "time_step_limit": [0.0, {"__float__": "Infinity"}]},
        },
        "Mamba2ForCausalLM of ",
    ),
    "resnet": (  # its norms change buffers
        {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        "ResNetForImageClassification of FILE, given pixel_values bfloat16 [2, 3, 224, 224], labels int64 [2]",
    ),
}


def written(folder: Path, config: object) -> str:
    """The path of a configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_models_are_fed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config, words = MODELS[name]
    path = written(tmp_path, config)
    length = ["--length", "64"] if name == "a number that JSON lacks" else []
    assert main(["plan", "--hf", path, "--mesh", "4", "--rows", "2", "--json", *length]) == 0
    found = json.loads(capsys.readouterr().out)
    assert words.replace("FILE", path) in found["model"] and found["seconds"] > found["compute_seconds"] > 0


def test_parameters_are_float32_whatever_the_file_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job = hugging_face(written(tmp_path, {"model_type": "llama", **TEXT, "dtype": "bfloat16"}))
    assert {leaf.dtype for _, leaf in fs.tree.paths(job.model.params)} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "32"}, "does not take this configuration of a llama"),
        ({"num_attention_heads": 0}, "does not take this configuration of a llama"),
        ({"hidden_size": -32}, "no llama can be made of this configuration: RuntimeError"),
        ({"architectures": ["BertForMaskedLM"]}, "no BertForMaskedLM can be made of this configuration"),
        ({"model_type": "decision_transformer"}, "write a FILE.py:make that gives its batch"),
    ],
)
def test_what_transformers_refuses(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = written(tmp_path, {"model_type": "llama", **TEXT, **change})
    with pytest.raises(PlanError) as raised:
        hugging_face(path)
    assert path in str(raised.value) and words in str(raised.value)


def test_chunks_of_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They hold less; where the step does not fit otherwise, they are offered."""
    pytest.importorskip("transformers")
    path = written(tmp_path, {"model_type": "llama", **TEXT, "vocab_size": 4096})
    command = ["plan", "--hf", path, "--mesh", "4", "--rows", "16", "--communicator", "1", "--precision", "fp32"]
    peaks = []
    for more in ([], ["--chunks", "8"]):
        assert main([*command, "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        peaks.append(found["peak_bytes"])
    assert "; logits in 8 chunks" in found["model"] and peaks[1] < 0.6 * peaks[0]
    assert main([*command, "--memory", str(sum(peaks) // 2)]) == 1
    assert "chunks=8: the head and its loss by chunks of rows (fs.causal_lm_loss)" in capsys.readouterr().out
    path = written(tmp_path, {"model_type": "bert", **TEXT, "architectures": ["BertForMaskedLM"]})
    with pytest.raises(PlanError, match="BertForMaskedLM is none of transformers' LlamaForCausalLM"):
        hugging_face(path, chunks=8)


def test_numbers_below_one() -> None:
    with pytest.raises(PlanError, match="--rows 0, --accumulate -1: give a number from 1 on"):
        hugging_face("config.json", rows=0, accumulate=-1)
