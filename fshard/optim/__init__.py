"""Optimizers: update rules that run fused on flat shards, and learning rates as pure functions of the step.

An optimizer is a frozen value. Its state is a dict of buffers that the caller keeps, the step number is an
argument, so nothing is hidden and a resumed run continues bit for bit. Nothing in this room knows of meshes,
plans or groups.
"""

from typing import Any

from fshard.hints import unknown_name
from fshard.optim import schedules
from fshard.optim.adafactor import adafactor
from fshard.optim.adamw import adamw
from fshard.optim.adamw8bit import adamw8bit
from fshard.optim.around import ema, every
from fshard.optim.base import Optimizer, Rate, State, rate
from fshard.optim.combinators import add_decay, chain, clip_value, masked, partition, scale
from fshard.optim.decay import Decay, matrices
from fshard.optim.form import Form, LeafInfo
from fshard.optim.from_torch import from_torch
from fshard.optim.lion import lion
from fshard.optim.muon import muon
from fshard.optim.sgd import sgd

__all__ = [
    "Decay",
    "Form",
    "LeafInfo",
    "Optimizer",
    "Rate",
    "State",
    "adafactor",
    "adamw",
    "adamw8bit",
    "add_decay",
    "chain",
    "clip_value",
    "ema",
    "every",
    "from_torch",
    "lion",
    "masked",
    "matrices",
    "muon",
    "partition",
    "rate",
    "scale",
    "schedules",
    "sgd",
]


def __getattr__(name: str) -> Any:
    """No name: the error says what is meant (PEP 562)."""
    raise unknown_name("fshard.optim", name)


def __dir__() -> list[str]:
    return sorted(__all__)
