"""Optimizers: update rules that run fused on flat shards, and learning rates as pure functions of the step.

An optimizer is a frozen value. Its state is a dict of buffers that the caller keeps, the step number is an
argument, so nothing is hidden and a resumed run continues bit for bit. Nothing in this room knows of meshes,
plans or groups.
"""

from fshard.optim.adamw import adamw
from fshard.optim.base import Optimizer, Rate, State, rate
from fshard.optim.decay import Decay, matrices
from fshard.optim.schedules import constant, linear, warmup_cosine, warmup_linear
from fshard.optim.sgd import sgd

__all__ = [
    "Decay",
    "Optimizer",
    "Rate",
    "State",
    "adamw",
    "constant",
    "linear",
    "matrices",
    "rate",
    "sgd",
    "warmup_cosine",
    "warmup_linear",
]
