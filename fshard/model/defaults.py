"""The initial values that torch's own modules give their parameters, as initializers.

A class that torch does not define, or a subclass with a method of its own that resets its parameters, gives no
initializer: a rule must name its leaves.
"""

import math
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNBase, RNNCellBase

from fshard.model import init
from fshard.model.init import Initializer

Inits = dict[str, Initializer]
Rule = Callable[[nn.Module], Inits]


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
    for kind, reset, rule in _rules():
        if isinstance(module, kind):
            same = getattr(type(module), reset) is getattr(kind, reset)
            return rule(module) if same else {}
    return {}


def _rules() -> Iterator[tuple[type[nn.Module], str, Rule]]:
    """Classes of torch, with the method that resets their parameters, and the initializers that equal that method."""
    plain = "reset_parameters"
    yield nn.Linear, plain, _weighted
    yield _ConvNd, plain, _weighted
    yield nn.Embedding, plain, _embedding
    yield nn.EmbeddingBag, plain, _embedding
    for norm in (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase):
        yield norm, plain, _norm
    yield nn.Bilinear, plain, _bilinear
    yield nn.PReLU, plain, _prelu
    yield RNNBase, plain, _recurrent
    yield RNNCellBase, plain, _recurrent
    yield nn.MultiheadAttention, "_reset_parameters", _attention
    yield nn.Transformer, "_reset_parameters", _transformer


def _weighted(module: nn.Module) -> Inits:
    assert isinstance(module, (nn.Linear, _ConvNd))
    fan_in = _fan_in(module)
    bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
    return {"weight": init.kaiming_uniform(a=math.sqrt(5)), "bias": init.uniform(-bound, bound)}


def _fan_in(module: nn.Linear | _ConvNd) -> int:
    # Where the weight is computed at each read, as by spectral_norm, reading it may move buffers.
    if isinstance(module, nn.Linear):
        return module.in_features
    channels = module.out_channels if module.transposed else module.in_channels
    return channels // module.groups * math.prod(module.kernel_size)


def _embedding(module: nn.Module) -> Inits:
    assert isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    row = module.padding_idx
    return {"weight": init.normal() if row is None else init.ZeroRow(init.normal(), row)}


def _norm(module: nn.Module) -> Inits:
    return {"weight": init.ones(), "bias": init.zeros()}


def _bilinear(module: nn.Module) -> Inits:
    assert isinstance(module, nn.Bilinear)
    bound = 1 / math.sqrt(module.in1_features)
    return dict.fromkeys(("weight", "bias"), init.uniform(-bound, bound))


def _prelu(module: nn.Module) -> Inits:
    assert isinstance(module, nn.PReLU)
    return {"weight": init.constant(module.init)}


def _recurrent(module: nn.Module) -> Inits:
    assert isinstance(module, (RNNBase, RNNCellBase))
    bound = 1 / math.sqrt(module.hidden_size) if module.hidden_size else 0.0
    return dict.fromkeys((name for name, _ in module.named_parameters()), init.uniform(-bound, bound))


def _attention(module: nn.Module) -> Inits:
    assert isinstance(module, nn.MultiheadAttention)
    weights = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    found = dict.fromkeys(weights, init.xavier_uniform())
    found |= dict.fromkeys(("in_proj_bias", "out_proj.bias"), init.zeros())
    return found | dict.fromkeys(("bias_k", "bias_v"), init.xavier_normal())


def _transformer(module: nn.Module) -> Inits:
    return {name: init.xavier_uniform() for name, p in module.named_parameters() if p.dim() > 1}
