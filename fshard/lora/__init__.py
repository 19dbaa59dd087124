"""LoRA: low-rank adapters beside frozen weights (Hu et al., "Low-Rank Adaptation of Large Language Models", 2021).

The adapters of a leaf ``blocks.0.q.weight`` of shape ``(n, m)`` are two more leaves of the same tree:
``blocks.0.q.weight_lora_a``, ``(rank, m)``, random, and ``blocks.0.q.weight_lora_b``, ``(n, rank)``, zero at first.
The weight reads as ``weight + alpha / rank * b @ a``. So adapters belong to the unit of the weight, and are sharded,
trained and saved like all other leaves; the weights themselves are frozen.
"""

from fshard.lora.adapted_trees import adapters, init, linear, wrap
from fshard.lora.merging import absorb, merge
from fshard.lora.modules import PATHS

__all__ = ["PATHS", "absorb", "adapters", "init", "linear", "merge", "wrap"]


def __dir__() -> list[str]:
    return sorted(__all__)
