"""Jobs from configurations of Hugging Face: a model without weights, its blocks as units, its own loss."""

import difflib
import json
from pathlib import Path
from typing import Any

import torch

from fshard import errors
from fshard.errors import PlanError
from fshard.foresight.jobs import Job
from fshard.model.meta import empty_weights
from fshard.model.precision import Precision
from fshard.model.split import split

LONGEST = 8192
"""Tokens of a row, unless the caller says how many: at most what the configuration allows."""


def hugging_face(
    path: str, rows: int = 1, length: int | None = None, precision: str = "bf16", remat: Any = None, accumulate: int = 1
) -> Job:
    """The job of a configuration: a folder or a ``config.json``. Nothing is downloaded, and no weight is made.

    Args:
        path: the file, or its folder.
        rows: of a rank's batch.
        length: tokens of a row; by default as many as positions, and at most ``LONGEST``.
        precision: ``"bf16"`` computes in bfloat16 over float32 parameters; ``"fp32"`` in float32.
        remat: as for ``fs.make_train_step``.
        accumulate: microbatches of a step; ``rows`` are those of one.

    Raises:
        PlanError: there is no such file, transformers does not know the model, or not what it is fed with.
        ImportError: transformers is not installed.
    """
    values = _values(path)
    try:
        import transformers
    except ImportError as error:
        raise errors.missing_extra("fshard plan --hf", "transformers", "examples") from error
    config = _config(path, values, transformers)
    with empty_weights():
        module = _model(path, config, transformers)
    if not hasattr(config, "vocab_size"):
        raise PlanError(f"{path}: a {config.model_type} reads no tokens: write a FILE.py:make that gives its batch")
    positions = getattr(config, "max_position_embeddings", None) or LONGEST
    length = length or min(positions, LONGEST)
    if length > positions:
        raise PlanError(f"--length {length} is more than the {positions} positions of {path}")
    model = split(module.train(), units="auto")
    words = torch.zeros(rows * accumulate, length, dtype=torch.long, device="cpu")
    batch = {"input_ids": words, "labels": words}

    def loss(params: Any, batch: Any) -> Any:
        return model.apply(params, **batch).loss

    chosen = Precision(compute=torch.bfloat16) if precision == "bf16" else None
    return Job(model, loss, batch, precision=chosen, remat=remat, accumulate=accumulate)


def _values(path: str) -> dict[str, Any]:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{file} cannot be read as a configuration: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise PlanError(f"{file} has no model_type, so it is no configuration of Hugging Face")
    return found


def _config(path: str, values: dict[str, Any], transformers: Any) -> Any:
    kind = values["model_type"]
    known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING.keys())
    if kind not in known:
        near = difflib.get_close_matches(kind, known, 3)
        hint = f" (near to it: {', '.join(near)})" if near else ""
        raise PlanError(
            f"{path}: transformers {transformers.__version__} knows no model_type {kind!r}{hint}: install a version "
            f"that does, or write a FILE.py:make that makes the model"
        )
    rest = {key: value for key, value in values.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(kind, **rest)
    config.use_cache = False
    return config


def _model(path: str, config: Any, transformers: Any) -> Any:
    names = [name for name in getattr(config, "architectures", None) or [] if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])(config)
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM):
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise PlanError(
        f"{path}: no model of {config.model_type!r} has a loss of its own that could be foreseen: write a FILE.py:make"
    )
