"""Running a program's units on slots: the engine, batches and losses of the loss function, and recomputation."""

from fshard.runtime.engine.batch import Microbatches, leading_dims, microbatches
from fshard.runtime.engine.hosted_activations import SavedView
from fshard.runtime.engine.loss_result import (
    Mean,
    check_differentiable,
    fingerprint,
    means_of,
    number,
    read_loss,
)
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.engine.remat_rules import Remat
from fshard.runtime.engine.rng import seeded

__all__ = [
    "Mean",
    "Microbatches",
    "Mispredicted",
    "Remat",
    "check_differentiable",
    "fingerprint",
    "leading_dims",
    "means_of",
    "microbatches",
    "number",
    "read_loss",
    "SavedView",
    "seeded",
]
