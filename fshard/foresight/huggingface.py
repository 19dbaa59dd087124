"""Jobs from configurations of Hugging Face: a model without weights, its blocks as units, its own loss."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fshard import errors
from fshard.errors import PlanError
from fshard.foresight.feeding import batch_of, loss_of, words
from fshard.foresight.jobs import Job
from fshard.losses.causal_lm import causal_lm_loss, takes_chunks
from fshard.model.meta import empty_weights
from fshard.model.precision import Precision
from fshard.model.split import split
from fshard.reading.texts import read_json

HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForImageClassification",
    "AutoModelForVideoClassification",
    "AutoModelForCTC",
    "AutoModelForAudioClassification",
    "AutoModel",
)
"""What is tried for a configuration that names no class, in this order."""


def hugging_face(
    path: str,
    rows: int = 1,
    length: int | None = None,
    precision: str = "bf16",
    remat: Any = None,
    accumulate: int = 1,
    chunks: int | None = None,
) -> Job:
    """The job of a configuration: a folder or a ``config.json``. Nothing is downloaded, and no weight is made.

    Args:
        path: the file, or its folder.
        rows: of a rank's batch.
        length: tokens or samples of a row; by default as many as positions, and at most ``feeding.LONGEST``.
        precision: ``"bf16"`` computes in bfloat16 over float32 parameters; ``"fp32"`` in float32.
        remat: as for ``fs.make_train_step``.
        accumulate: microbatches of a step; ``rows`` are those of one.
        chunks: of logits, as for ``fs.causal_lm_loss``; None for the model's own loss.

    Raises:
        PlanError: there is no such file, transformers does not know the model, or not what it is fed with; or
            ``fs.causal_lm_loss`` does not know the model.
        ImportError: transformers is not installed.
    """
    _check(rows=rows, length=length, accumulate=accumulate, chunks=chunks)
    file, values = _values(path)
    try:
        import transformers
    except ImportError as error:
        raise errors.missing_extra("fshard plan --hf", "transformers", "examples") from error
    config = _config(file, values, transformers)
    module, other = _model(file, config, transformers)
    short = precision == "bf16"
    dtype = torch.bfloat16 if short else torch.float32
    batch = batch_of(str(file), module, config, rows * accumulate, length, dtype)
    given: dict[str, Any] = (
        {"return_loss": True} if "return_loss" in inspect.signature(module.forward).parameters else {}
    )
    model = split(module.train(), units="auto")

    tracks = any(getattr(each, "track_running_stats", False) for each in module.modules())

    def loss(params: Any, batch: Any) -> Any:
        if tracks:  # what the norms of a batch change is no part of a plan
            return loss_of(model.apply(params, buffers=model.buffers, **batch, **given)[0])
        return loss_of(model.apply(params, **batch, **given))

    chosen = Precision(compute=torch.bfloat16) if short else None
    told = f"{type(module).__name__} of {file}{other}, {words(module, batch)}"
    made = Job(model, loss, batch, precision=chosen, remat=remat, accumulate=accumulate, words=told)
    if chunks is not None:
        return replace(made, loss=causal_lm_loss(model, chunks=chunks), words=f"{told}; logits in {chunks} chunks")
    return replace(made, chunked=lambda n: causal_lm_loss(model, chunks=n)) if takes_chunks(module) else made


def _check(**numbers: int | None) -> None:
    wrong = [f"--{name} {value}" for name, value in numbers.items() if value is not None and value < 1]
    if wrong:
        raise PlanError(f"{', '.join(wrong)}: give a number from 1 on")


def _values(path: str) -> tuple[Path, dict[str, Any]]:
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    found = _with_floats(read_json(file, infinite=True))
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise PlanError(f"{file} has no model_type, so it is no configuration of Hugging Face")
    return file, found


def _with_floats(value: Any) -> Any:
    """A value whose numbers that JSON lacks are floats; transformers writes them as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in ("NaN", "Infinity", "-Infinity"):
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _config(file: Path, values: dict[str, Any], transformers: Any) -> Any:
    kind, version = values["model_type"], transformers.__version__
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        near = difflib.get_close_matches(kind, [*known.keys()], 3)
        hint = f" (near to it: {', '.join(near)})" if near else ""
        raise PlanError(
            f"{file}: transformers {version} knows no model_type {kind!r}{hint}: install a version "
            f"that does, or write a FILE.py:make that makes the model"
        )
    try:
        config = known[kind].from_dict(values)
        for each in (config, config.get_text_config()):
            each.use_cache = False
    except Exception as error:  # each class has checks of its own
        raise PlanError(
            f"{file}: transformers {version} does not take this configuration of a {kind}: {error}: correct the file"
        ) from error
    return config


def _model(file: Path, config: Any, transformers: Any) -> tuple[Any, str]:
    """The model on the meta device; and in words, why it is of another class than the configuration names."""
    named = getattr(config, "architectures", None) or []
    named = [named] if isinstance(named, str) else [str(name) for name in named]
    found = _class(named, transformers)
    other = f" (transformers has no model {', '.join(named)})" if named and found is None else ""
    make = found or _auto(file, config, transformers)
    try:
        with empty_weights():
            return make(config), other
    except Exception as error:  # each model has checks of its own
        raise PlanError(
            f"{file}: no {found.__name__ if found else config.model_type} can be made of this configuration: "
            f"{type(error).__name__}: {error}: correct the file, or write a FILE.py:make that makes the model"
        ) from error


def _class(named: Sequence[str], transformers: Any) -> Any:
    """The first of these names that is a model; None if none is."""
    kinds = [getattr(transformers, name, None) for name in named]
    model = transformers.PreTrainedModel
    return next((each for each in kinds if isinstance(each, type) and issubclass(each, model)), None)


def _auto(file: Path, config: Any, transformers: Any) -> Callable[[Any], Any]:
    """Return what makes the model of a configuration that names no class."""
    autos = [getattr(transformers, name) for name in HEADS]
    auto = next((each for each in autos if type(config) in each._model_mapping), None)
    if auto is None:
        raise PlanError(f"{file}: transformers has no model of a {config.model_type}: write a FILE.py:make")
    return functools.partial(auto.from_config, dtype=torch.float32)
