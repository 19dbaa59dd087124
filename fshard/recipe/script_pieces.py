"""Functions that scripts of configs hold a copy of: rows, first values, and losses of tensors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fshard import tree
from fshard.errors import PlanError
from fshard.lora import PATHS
from fshard.model import initial_values as init


def matrices(model: Any) -> str:
    """A pattern of the paths of all matrices in the units of a model."""
    inside = tuple(f"{unit}." for unit in model.units)
    found = [path for path, leaf in tree.paths(model.params) if leaf.ndim == 2 and path.startswith(inside)]
    if not found:
        raise PlanError(f"the {len(model.units)} units of the model have no matrices: name others in model.units")
    return "|".join(map(re.escape, found))


def fresh(model: Any) -> list[tuple[str, Any]]:
    """First values of a model of Hugging Face: biases 0, other vectors 1, all else normal; of adapters, their own."""
    std, out = getattr(model.module.config, "initializer_range", 0.02), []
    for path, leaf in tree.paths(model.params):
        own = init.normal(std) if leaf.ndim > 1 else init.zeros() if path.endswith("bias") else init.ones()
        out.append((re.escape(path), model.inits[path] if re.fullmatch(PATHS, path) else own))
    return out


def held_out(documents: Any, share: float) -> tuple[Any, Any]:
    """Documents, or the tokens of the only one, to train on, and those at the end that are held out."""
    if isinstance(documents, list) and len(documents) == 1 and isinstance(documents[0], Tensor):
        train, test = held_out(documents[0], share)
        return [train], [test] if len(test) else []
    cut = min(len(documents) - 1, int(len(documents) * (1 - share))) if share else len(documents)
    if cut < 1:
        raise PlanError(f"held_out = {share} of {len(documents)} leaves nothing: give more data, or held_out = 0")
    return documents[:cut], documents[cut:]


def windows(text: Tensor, length: int, step: int) -> Tensor:
    """The rows of a text that begin ``step`` tokens apart: each has a row's tokens, and the one after it."""
    if 0 < len(text) <= length:
        raise PlanError(
            f"{len(text)} tokens are fewer than a row of {length} and one more: give more data, or less length"
        )
    return text.unfold(0, length + 1, step) if len(text) else text.new_empty(0, length + 1)


def full_batches(count: int, batch: int, most: int | None) -> Sequence[Tensor]:
    """The held-out rows of each batch of an evaluation."""
    if count < batch:
        raise PlanError(f"{count} rows are held out, less than a batch of {batch}: give more data, or held_out = 0")
    return [torch.arange(begin, begin + batch, device="cpu") for begin in range(0, count - batch + 1, batch)][:most]


class Answers:
    """Rows whose targets are those of answers alone.

    Args:
        tokens: the packed documents.
        marks: the same, packed alike: 1 for each token of an answer, 0 for those of prompts.
    """

    def __init__(self, tokens: Any, marks: Any) -> None:
        self.tokens, self.marks = tokens, marks

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        found = self.tokens[row]
        return {**found, "targets": found["targets"].where(self.marks[row]["targets"] == 1, -100)}


def padded(prompt: Tensor, better: Tensor, worse: Tensor, length: int) -> dict[str, Tensor]:
    """A prompt with two answers, (2, length): tokens, and marks of the answers. What is longer is cut at its end."""
    if len(prompt) >= length:
        raise PlanError(f"a prompt has {len(prompt)} tokens, and a row {length}: give more data.length")
    tokens, marks = torch.zeros(2, 2, length, dtype=torch.int64, device="cpu")
    for row, answer in enumerate((better, worse)):
        both = torch.cat((prompt, answer))[:length]
        tokens[row, : len(both)], marks[row, len(prompt) : len(both)] = both, 1
    return {"tokens": tokens, "marks": marks}


def on_device(rows: list[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    """Rows as one batch on a device."""
    return {name: x.to(device) for name, x in default_collate(rows).items()}


def answer_scores(logits: Tensor, tokens: Tensor, marks: Tensor) -> Tensor:
    """The log probability of each row's answer, (rows,)."""
    scores = logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (scores * marks[:, 1:]).sum(1)


@dataclass(frozen=True)
class WarmupStableDecay:
    """A rise to a peak, a plateau, and a straight fall to a floor at the end (Hu et al., "MiniCPM", 2024)."""

    peak: float
    warmup: int
    total: int
    cooldown: int
    floor: float = 0.0

    def __call__(self, step: int) -> float:
        risen = min(1.0, (step + 1) / (self.warmup + 1))
        left = min(1.0, max(0.0, (self.total - step) / self.cooldown))
        return self.floor + (self.peak * risen - self.floor) * left
