"""Text from sharded weights: sampling with a key-value cache, perplexity, lm-evaluation-harness."""

from fshard.generation.generate import Generate, Generated, Sampling, make_generate
from fshard.generation.harness import harness
from fshard.generation.hugging_face import hugging_face
from fshard.generation.places import Kept, Places
from fshard.generation.score import Perplexity

__all__ = [
    "Generate",
    "Generated",
    "Kept",
    "Perplexity",
    "Places",
    "Sampling",
    "harness",
    "hugging_face",
    "make_generate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
