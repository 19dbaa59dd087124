"""Text from sharded weights: sampling with a key-value cache, perplexity, lm-evaluation-harness."""

from fshard.generation.generate import Generate, Generated, generate, make_generate
from fshard.generation.harness import harness
from fshard.generation.hugging_face import hugging_face
from fshard.generation.places import Places
from fshard.generation.sampling import Sampling
from fshard.generation.score import Perplexity, perplexity

__all__ = [
    "Generate",
    "Generated",
    "Perplexity",
    "Places",
    "Sampling",
    "generate",
    "harness",
    "hugging_face",
    "make_generate",
    "perplexity",
]
