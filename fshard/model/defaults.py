"""The initial values that torch's own modules give their parameters, as initializers.

A class that torch does not define, or a subclass with a method of its own that resets its parameters, gives no
initializer: a rule must name its leaves.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from fshard.model import initial_values as init
from fshard.model.initial_values import Initializer
from fshard.torch_internals import ConvNd, NormBase

Inits = dict[str, Initializer]


def deduce(module: nn.Module) -> Inits:
    """The initializers of a module's parameters by path; parameters of unknown classes are absent.

    >>> deduce(nn.LayerNorm(8))
    {'weight': Constant(value=1.0), 'bias': Constant(value=0.0)}
    """
    found: Inits = {}
    for prefix, owner in module.named_modules():  # parents come first, and may speak for their children
        for name, initializer in _own(owner).items():
            found.setdefault(f"{prefix}.{name}" if prefix else name, initializer)
    return {path: found[path] for path, _ in module.named_parameters() if path in found}


def _own(module: nn.Module) -> Inits:
    for kinds, rule in _RULES:
        for kind in kinds:
            if isinstance(module, kind):
                reset = "_reset_parameters" if hasattr(kind, "_reset_parameters") else "reset_parameters"
                return rule(module) if getattr(type(module), reset) is getattr(kind, reset) else {}
    return {}


def _weighted(module: nn.Linear | ConvNd) -> Inits:
    # Where the weight is computed at each read, as by spectral_norm, reading it may move buffers.
    if isinstance(module, nn.Linear):
        fan_in = module.in_features
    else:
        channels = module.out_channels if module.transposed else module.in_channels
        fan_in = channels // module.groups * math.prod(module.kernel_size)
    return {"weight": init.kaiming_uniform(a=math.sqrt(5)), "bias": _bounded(fan_in)}


def _bounded(size: int) -> Initializer:
    bound = 1 / math.sqrt(size) if size else 0.0
    return init.uniform(-bound, bound)


def _embedding(module: nn.Embedding | nn.EmbeddingBag) -> Inits:
    row = module.padding_idx
    return {"weight": init.normal() if row is None else init.ZeroRow(init.normal(), row)}


def _recurrent(module: RNNBase | RNNCellBase) -> Inits:
    return dict.fromkeys((name for name, _ in module.named_parameters()), _bounded(module.hidden_size))


def _attention(module: nn.MultiheadAttention) -> Inits:
    weights = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    found = dict.fromkeys(weights, init.xavier_uniform())
    found |= dict.fromkeys(("in_proj_bias", "out_proj.bias"), init.zeros())
    return found | dict.fromkeys(("bias_k", "bias_v"), init.xavier_normal())


def _transformer(module: nn.Transformer) -> Inits:
    return {name: init.xavier_uniform() for name, p in module.named_parameters() if p.dim() > 1}


_RULES: tuple[tuple[tuple[type[nn.Module], ...], Callable[[Any], Inits]], ...] = (
    ((nn.Linear, ConvNd), _weighted),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    ((nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, NormBase), lambda _: {"weight": init.ones(), "bias": init.zeros()}),
    ((nn.Bilinear,), lambda module: dict.fromkeys(("weight", "bias"), _bounded(module.in1_features))),
    ((nn.PReLU,), lambda module: {"weight": init.constant(module.init)}),
    ((RNNBase, RNNCellBase), _recurrent),
    ((nn.MultiheadAttention,), _attention),
    ((nn.Transformer,), _transformer),
)
"""Classes of torch, and the initializers that equal the method of each that resets its parameters."""
