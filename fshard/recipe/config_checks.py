"""Checks of keys that belong together, and what a config's sources are."""

from pathlib import Path

from fshard.errors import PlanError, lines
from fshard.model import initial_values
from fshard.recipe.train_config import TrainConfig


def check_config(config: TrainConfig) -> None:
    """Refuse keys that do not fit together.

    Raises:
        PlanError: naming each key, its value, and what to give.
    """
    kind, data, mesh = config.objective.kind, config.data, config.mesh
    texts = kind != "next-token" and source_format(config) == "text"
    tests = {
        "model.source is missing: give FILE.py:FUNCTION, a config.json, or a model of Hugging Face": (
            not config.model.source
        ),
        f"objective.kind = {kind!r} needs records: give data.source files of JSON lines or parquet": texts,
        f"data.rows = 'windows' is for next-token alone: drop it for {kind!r}": (
            data.rows == "windows" and kind != "next-token"
        ),
        f"data.held_out = {data.held_out} leaves nothing to train on: give a share below 1": data.held_out >= 1,
        "data.source: give one data set of Hugging Face, and its configuration if it has several": (
            data.format == "huggingface" and len(data.source) not in (1, 2)
        ),
        "optimizer.name = 'muon' trains whole matrices: give adamw with model.lora": (
            config.model.lora.rank > 0 and config.optimizer.name == "muon"
        ),
        f"optimizer.betas = {list(config.optimizer.betas)}: give two numbers": len(config.optimizer.betas) != 2,
        f"mesh.shape has {len(mesh.shape)} sizes and mesh.axes {len(mesh.axes)} names: give as many": (
            len(mesh.shape) != len(mesh.axes)
        ),
        "track.tensorboard writes to a folder: give out": config.track.tensorboard and not config.out,
        "checkpoints.every saves to a folder: give out": config.checkpoints.every > 0 and not config.out,
    }
    problems = [text for text, wrong in tests.items() if wrong] + [*_rows(config)]
    if problems:
        raise PlanError(lines("the config cannot be used:", problems, "fshard train --help lists every key."))


def _rows(config: TrainConfig) -> list[str]:
    """Problems of rules and first values."""
    kinds = {"fsdp": range(1, 9), "replicated": range(1, 2), "dims": range(2, 9)}
    bad = [
        f'mesh.rules: {list(rule)}: give [pattern, "fsdp", axis...], [pattern, "replicated"] or [pattern, "dims", ...]'
        for rule in config.mesh.rules
        if len(rule) < 2 or len(rule) - 1 not in kinds.get(rule[1], ())
    ]
    names = [name for name in initial_values.__all__ if name.islower()]
    return bad + [
        f"model.init: {list(rule)}: give [pattern, one of {', '.join(names)}, its numbers...]"
        for rule in config.model.init
        if len(rule) < 2 or rule[1] not in names
    ]


def source_format(config: TrainConfig) -> str:
    """The format of the data: as it says, or by the name of its first source."""
    data = config.data
    if data.format != "auto":
        return data.format
    ends = {"jsonl": "jsonl", "ndjson": "jsonl", "parquet": "parquet"}
    return ends.get(data.source[0].rpartition(".")[2], "text") if data.source else "text"


def is_function(config: TrainConfig) -> bool:
    """Tell whether the model is a function of a file."""
    file, colon, _ = config.model.source.rpartition(":")
    return bool(colon) and file.endswith(".py")


def tokenizer(config: TrainConfig) -> str:
    """The tokenizer: as the config says, or that of the model if its weights are read, or else bytes."""
    name = config.data.tokenizer
    return name if name != "auto" else config.model.source if reads_weights(config) else "bytes"


def reads_weights(config: TrainConfig) -> bool:
    """Tell whether a model of Hugging Face has values to start from, and the config wants them."""
    source, ends = Path(config.model.source), (".safetensors", ".bin", ".pt", ".index.json")
    if config.model.weights == "fresh" or is_function(config) or source.is_file():
        return False
    return not source.is_dir() or any(path.name.endswith(ends) for path in source.iterdir())
