"""Batches for models of transformers: zeros by the arguments of their forward, and their loss."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard.errors import PlanError

LONGEST = 8192
"""Tokens of a row, unless the caller says how many: at most what the configuration allows."""

SAMPLES = 16_000
"""Samples of a row of sound, unless the caller says how many: a second at the usual rate."""

LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len")
"""What configurations call the most positions."""

COMPARED = ("labels", "start_positions", "next_sentence_label")
"""What models compute a loss with."""

LABELLED = ("SequenceClassification", "ImageClassification", "AudioClassification", "VideoClassification")
"""Heads with one label a row."""


def batch_of(path: str, module: nn.Module, config: Any, rows: int, length: int | None, dtype: Any) -> dict[str, Tensor]:
    """A batch of zeros for a model.

    Args:
        path: of its configuration, for errors.
        module: the model.
        config: its configuration.
        rows: of the batch.
        length: tokens or samples of a row; by default as many as positions, and at most ``LONGEST``.
        dtype: of pictures and sounds.

    Raises:
        PlanError: more tokens than the model has positions for, or it reads something else than tokens, pictures and
            sounds.
    """
    takes = inspect.signature(module.forward).parameters
    tokens = torch.zeros(rows, _length(path, config, length), dtype=torch.long, device="cpu")
    size = _size(config)
    found = {name: x for name, x in _sounds(takes, config, rows, length, dtype).items() if name in takes}
    if "input_ids" in takes:
        found["input_ids"] = tokens
    if size and _looks(takes):
        found["pixel_values"] = torch.zeros(rows, *size, dtype=dtype, device="cpu")
    if "decoder_input_ids" in takes and getattr(config, "is_encoder_decoder", False):
        found["decoder_input_ids"] = tokens
    unknown = [name for name, each in takes.items() if _needed(each) and name not in found]
    if unknown or not found:
        reads = ", ".join(unknown) or "something else than tokens, pictures and sounds"
        raise PlanError(f"{path}: {type(module).__name__} reads {reads}: write a FILE.py:make that gives its batch")
    return found | _labels(type(module).__name__, takes, tokens, size, rows)


def _looks(takes: Mapping[str, inspect.Parameter]) -> bool:
    """Tell whether a model is given pictures: it reads nothing else, needs them, or compares them with texts."""
    if "pixel_values" not in takes:
        return False
    alone = "input_ids" not in takes and "decoder_input_ids" not in takes
    return alone or "return_loss" in takes or _needed(takes["pixel_values"])


def words(module: nn.Module, batch: Mapping[str, Tensor]) -> str:
    """Return what a model is fed with, and what it is not, in words."""
    takes = inspect.signature(module.forward).parameters
    given = ", ".join(f"{name} {str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in batch.items())
    lacks = " and no pictures" if "pixel_values" in takes and "pixel_values" not in batch else ""
    own = "return_loss" in takes or not batch.keys().isdisjoint(COMPARED)
    return f"given {given}{lacks}" + ("" if own else "; its loss: the mean square of what it returns first")


def loss_of(out: Any) -> Tensor:
    """The loss of a model's output; of a model that has none, the mean square of what it returns first."""
    loss = getattr(out, "loss", None)
    if loss is not None:
        return loss.float()  # type: ignore[no-any-return]
    first = next(x for x in tree.leaves(dict(out)) if isinstance(x, Tensor) and x.dtype.is_floating_point)
    return first.float().square().mean()


def _needed(parameter: inspect.Parameter) -> bool:
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return parameter.default is inspect.Parameter.empty and parameter.kind not in kinds


def _length(path: str, config: Any, length: int | None) -> int:
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in LIMITS]
    most = next((each for each in limits if isinstance(each, int) and each > 0), None)
    found = length or min(most or LONGEST, LONGEST)
    if most is not None and found > most:
        raise PlanError(f"--length {found} is more than the {most} positions of {path}")
    return found


def _size(config: Any) -> tuple[int, int, int] | None:
    """Channels, height and width of the pictures that a model reads; None if it reads none."""
    for each in (config, getattr(config, "vision_config", None)):
        side = getattr(each, "image_size", None)
        if side:
            height, width = (side, side) if isinstance(side, int) else side
            return getattr(each, "num_channels", 3), height, width
    if hasattr(config, "num_channels"):  # such as ResNet, which reads any size
        return config.num_channels, 224, 224
    return None


def _sounds(takes: Mapping[str, Any], config: Any, rows: int, length: int | None, dtype: Any) -> dict[str, Tensor]:
    """A second of sound, or as long a spectrogram as the model reads."""
    bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None)
    found = {}
    if bins and hasattr(config, "max_source_positions"):
        shape = (bins, 2 * config.max_source_positions)
        found["input_features"] = torch.zeros(rows, *shape, dtype=dtype, device="cpu")
    if bins and hasattr(config, "max_length"):
        found["input_values"] = torch.zeros(rows, config.max_length, bins, dtype=dtype, device="cpu")
    elif "input_values" in takes:
        found["input_values"] = torch.zeros(rows, length or SAMPLES, dtype=dtype, device="cpu")
    return found


def _labels(
    name: str, takes: Mapping[str, Any], tokens: Tensor, size: tuple[int, int, int] | None, rows: int
) -> dict[str, Tensor]:
    """Return what a head compares with."""
    one = torch.zeros(rows, dtype=torch.long, device="cpu")
    if "start_positions" in takes and "end_positions" in takes:
        return {"start_positions": one, "end_positions": one}
    found = {"next_sentence_label": one} if "next_sentence_label" in takes else {}
    if "labels" not in takes or name.endswith("ForCTC"):  # the loss of CTC depends on the values of labels
        return found
    if name.endswith(LABELLED):
        return found | {"labels": one}
    if name.endswith("SemanticSegmentation") and size:
        return found | {"labels": torch.zeros(rows, *size[1:], dtype=torch.long, device="cpu")}
    return found | {"labels": tokens}
