"""Computes operators in other ways where PyTorch's derivatives of them are wrong or missing.

Some formulas for derivatives read a result that PyTorch takes for a constant, such as the mean of a layer norm or the
factors of a linear solve. The first derivative is right; a derivative of it is silently wrong. The ``jvp`` of a custom
``torch.autograd.Function`` has the same fault under a second ``jvp``. A few operators have a wrong forward derivative,
or none. All of them are computed in other operators (``formulas``), or with forward derivatives taken by two reverse
ones, which are right: the pullback of a pullback is the pushforward.

``tests/model/test_derivatives.py`` compares operators in every order of derivatives with reverse over reverse, and so
finds the rows of the table below.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from fshard.model import formulas

Op = Callable[..., Any]


class Transforms(NamedTuple):
    """The active transforms."""

    order: int  # how many of them differentiate, plain autograd included
    forward: int  # how many of these take forward derivatives
    nested: bool  # whether a derivative of a forward derivative is taken


class Rule(NamedTuple):
    """When an operator is computed in another way, and by which formula; None for ``by_reverse``."""

    when: Callable[[Transforms], int]
    formula: Op | None = None


_nested, _forward = attrgetter("nested"), attrgetter("forward")


def _third(under: Transforms) -> bool:
    return under.nested or under.order > 2


def _second(under: Transforms) -> bool:
    return under.forward > 0 or under.order > 1


RULES: Mapping[Op, Rule] = {
    # Formulas that take statistics, or factors of a matrix, for constants.
    F.layer_norm: Rule(_third, formulas.layer_norm),
    torch.layer_norm: Rule(_third, formulas.layer_norm),
    torch.native_layer_norm: Rule(_third, formulas.native_layer_norm),
    F.batch_norm: Rule(_third, formulas.batch_norm),
    torch.batch_norm: Rule(_third, formulas.raw(formulas.batch_norm)),
    torch.native_batch_norm: Rule(_third, formulas.native_batch_norm),
    F.instance_norm: Rule(_third, formulas.instance_norm),
    torch.instance_norm: Rule(_third, formulas.raw(formulas.instance_norm)),
    **{getattr(space, name): Rule(_nested) for space in (torch, Tensor) for name in ("det", "logdet", "slogdet")},
    **{
        getattr(torch.linalg, name): Rule(_nested)
        for name in ("det", "slogdet", "solve", "solve_ex", "tensorsolve", "householder_product", "eig", "eigvals")
    },
    # No forward derivative, or none of the gradient.
    F.mse_loss: Rule(_forward, formulas.mse_loss),
    F.huber_loss: Rule(_forward, formulas.huber_loss),
    F.soft_margin_loss: Rule(_forward, formulas.soft_margin_loss),
    F.glu: Rule(_forward, formulas.glu),
    F.grid_sample: Rule(_forward),
    torch.grid_sampler: Rule(_forward),
    F.scaled_dot_product_attention: Rule(_second, formulas.attention),
    # A wrong forward derivative, and a wrong second one.
    torch.cholesky_inverse: Rule(_forward),
    torch.scatter_reduce: Rule(_forward),
    torch.Tensor.scatter_reduce: Rule(_forward),
    torch._weight_norm: Rule(_second, formulas.weight_norm),
}
"""Operators whose derivatives are wrong or missing in PyTorch 2.11 to 2.13."""

_CUSTOM = torch._functorch.autograd_function.custom_function_call
_JVP, _GRAD = _functorch.TransformType.Jvp, _functorch.TransformType.Grad


class Exact(TorchFunctionMode):
    """Computes the operators of the table so that their derivatives are right.

    ``by_reverse`` makes a function whose forward derivative is taken by reverse ones; ``used`` says whether an operator
    was computed in another way.
    """

    def __init__(self, by_reverse: Callable[[Op], Op]) -> None:
        super().__init__()
        self.by_reverse = by_reverse
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, or its replacement."""
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is None:
            if func is _CUSTOM and not args[0].__module__.startswith("fshard.") and _active(args).forward > 1:
                self.used = True
                return self.by_reverse(args[0].apply)(*args[1:], **kwargs)
            return func(*args, **kwargs)
        if _functorch.peek_interpreter_stack() is None or not rule.when(_active(args)):
            return func(*args, **kwargs)
        self.used = True
        return (rule.formula or self.by_reverse(func))(*args, **kwargs)


def _active(args: Any) -> Transforms:
    """The transforms that are active around an operator with these arguments."""
    stack = [level.key() for level in _functorch.get_interpreter_stack() or ()]  # the outermost first
    kinds = [kind for kind in stack if kind in (_JVP, _GRAD)]
    recorded, forward = _recorded(args), kinds.count(_JVP)
    nested = forward > 0 and (recorded or kinds[0] == _GRAD or forward > 1)
    return Transforms(recorded + len(kinds), forward, nested)


def _recorded(args: Any) -> bool:
    """Whether plain autograd records operations on one of these tensors, outside of all transforms."""
    if not torch.is_grad_enabled():
        return False
    for tensor in args:
        while isinstance(tensor, Tensor) and _functorch.is_functorch_wrapped_tensor(tensor):
            tensor = _functorch.get_unwrapped(tensor)
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            return True
    return False
