"""Losses whose logits are never whole: the head and its cross-entropy by chunks of rows, and models that take them."""

from fshard.losses.causal_lm import causal_lm_loss
from fshard.losses.chunked_cross_entropy import chunked_cross_entropy

__all__ = ["causal_lm_loss", "chunked_cross_entropy"]


def __dir__() -> list[str]:
    return sorted(__all__)
