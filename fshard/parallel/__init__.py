"""Tensor, sequence, expert and context parallelism: pure functions for the code of units, and rules for their leaves.

================== ============================= ==========================================================
tensor parallel    ``column_rule``, ``row_rule`` ``column_linear``, ``row_linear``, ``local_heads``
vocabulary         ``column_rule``               ``vocab_embedding``, ``vocab_cross_entropy``, ``padded``
sequence parallel  leaves whole along the axis   ``rms_norm``, ``layer_norm``, ``shared``, ``split_sequence``
expert parallel    ``expert_rule``               ``route``, ``moe``, ``grouped_linear``, ``load_balance_loss``
context parallel   one or two more data axes     ``ring_attention``, ``ulysses_attention``, ``zigzag_slice``
models' own plans  ``fs.suggest_rules``          ``parallelize``
Hugging Face       the same                      ``register_attention``, ``context_batch``
================== ============================= ==========================================================

The axis of the first three is *not* named in ``batch=``: its ranks work on the same rows and return the same loss. The
axes of experts and of the context are data axes: each of their ranks has its own tokens.
"""

from fshard.parallel.context_batch import context_batch, document_ids
from fshard.parallel.experts import Dispatched, combine, dispatch, grouped_linear, moe
from fshard.parallel.hf_attention import register_attention
from fshard.parallel.linear_layers import (
    column_linear,
    column_rule,
    expert_rule,
    local_heads,
    megatron_rules,
    row_linear,
    row_rule,
)
from fshard.parallel.model_plans import parallelize
from fshard.parallel.ring import ring_attention
from fshard.parallel.routing import Routing, load_balance_loss, route, z_loss
from fshard.parallel.sequence import join_sequence, layer_norm, rms_norm, shared, split_sequence
from fshard.parallel.ulysses import ulysses_attention
from fshard.parallel.vocab import padded, vocab_cross_entropy, vocab_embedding
from fshard.parallel.zigzag import unzigzag, zigzag, zigzag_positions, zigzag_slice

__all__ = [
    "Dispatched",
    "Routing",
    "column_linear",
    "column_rule",
    "combine",
    "context_batch",
    "dispatch",
    "document_ids",
    "expert_rule",
    "grouped_linear",
    "join_sequence",
    "layer_norm",
    "load_balance_loss",
    "local_heads",
    "megatron_rules",
    "moe",
    "padded",
    "parallelize",
    "register_attention",
    "ring_attention",
    "rms_norm",
    "route",
    "row_linear",
    "row_rule",
    "shared",
    "split_sequence",
    "ulysses_attention",
    "unzigzag",
    "vocab_cross_entropy",
    "vocab_embedding",
    "z_loss",
    "zigzag",
    "zigzag_positions",
    "zigzag_slice",
]


def __dir__() -> list[str]:
    return sorted(__all__)
