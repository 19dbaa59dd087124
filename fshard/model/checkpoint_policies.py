"""The results that recomputation keeps: ``fs.checkpoint_policies.nothing``, ``dots``, ``everything``, ``saving(ops)``.

And where they are kept: ``offload(...)`` keeps them in the memory of the host.

A policy says for each operator of a forward whether its result is kept for the backward or computed again there
(``jax.checkpoint_policies``). ``fs.remat`` and the train step read it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fshard.errors import PlanError
from fshard.torch_internals import OpOverloadPacket

__all__ = ["SavePolicy", "dots", "everything", "nothing", "offload", "saving"]


@dataclass(frozen=True)
class SavePolicy:
    """Chooses the operators whose results are kept.

    Attributes:
        name: for messages and schedules.
        ops: the ``torch.ops.aten`` operators whose results are kept; None for all of them.
        ahead: the computes by which what is kept comes back from the host ahead of its backward; 0 where it stays on
            the device.

    >>> dots = fs.checkpoint_policies.dots
    >>> dots.saves(torch.ops.aten.mm.default), dots.saves(torch.ops.aten.tanh.default)
    (True, False)
    """

    name: str
    ops: frozenset[OpOverloadPacket] | None
    ahead: int = 0

    def __repr__(self) -> str:
        return f"fs.checkpoint_policies.{self.name}"

    def saves(self, op: Any) -> bool:
        """Tell whether the results of an operator, or of one of its overloads, are kept."""
        return self.ops is None or getattr(op, "overloadpacket", op) in self.ops

    def contexts(self) -> Callable[[], tuple[Any, Any]]:
        """``context_fn`` for ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``."""
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        kept: Any = _save  # Dynamo takes a plain function or a list as a constant, and no method
        if self.ops is not None:
            kept = [getattr(op, name) for op in sorted(self.ops, key=str) for name in op.overloads()]  # type: ignore[no-untyped-call]
        return functools.partial(create_selective_checkpoint_contexts, kept)


def _save(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE


def saving(*ops: Any) -> SavePolicy:
    """Keep the results of these operators.

    Args:
        *ops: of ``torch.ops.aten``, such as ``torch.ops.aten.exp``; an overload counts for all of its operator.

    Raises:
        PlanError: an argument is not an operator.

    >>> fs.checkpoint_policies.saving(torch.ops.aten.exp).saves(torch.ops.aten.exp.default)
    True
    """
    packets = [getattr(op, "overloadpacket", op) for op in ops]
    wrong = [repr(op) for op in packets if not isinstance(op, OpOverloadPacket)]
    if wrong or not packets:
        raise PlanError(f"saving({', '.join(wrong)}): name operators of torch.ops, such as torch.ops.aten.mm")
    return SavePolicy(f"saving({', '.join(sorted(str(op) for op in packets))})", frozenset(packets))


def offload(*, prefetch: int = 1) -> SavePolicy:
    """Keep what autograd keeps, in page-locked memory of the host: less memory on the device, and no bit is other.

    What a unit keeps leaves the device while the next unit runs, and comes back ahead of its backward. The units whose
    backwards are the first keep theirs on the device: it would come straight back. Train steps read it, as
    ``make_train_step(..., remat=fs.checkpoint_policies.offload())``, or ``remat="offload"``; ``fs.remat`` cannot.

    Args:
        prefetch: the backwards by which it comes back ahead of its own. As many units keep theirs on the device.

    Raises:
        PlanError: prefetch is not an int of at least 1.

    >>> fs.checkpoint_policies.offload(prefetch=2)
    fs.checkpoint_policies.offload(prefetch=2)
    """
    if type(prefetch) is not int or prefetch < 1:
        raise PlanError(
            f"offload(prefetch={prefetch!r}): activations come back at least 1 backward ahead of their own, so that "
            f"the copy has a compute to run beside: give an int of at least 1"
        )
    return SavePolicy(f"offload(prefetch={prefetch})", None, prefetch)


nothing = SavePolicy("nothing", frozenset())
"""Keep the inputs only, and compute everything again: the least memory, about a third more compute.

>>> fs.checkpoint_policies.nothing.saves(torch.ops.aten.mm)
False
"""

everything = SavePolicy("everything", None)
"""Keep what autograd keeps: no recomputation.

>>> fs.checkpoint_policies.everything.saves(torch.ops.aten.exp)
True
"""

_aten = torch.ops.aten
dots = SavePolicy(
    "dots",
    frozenset(
        (
            *(_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution),
            *(_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_efficient_attention),
            *(_aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_cudnn_attention),
        )
    ),
)
"""Keep the results of matrix products, convolutions and fused attention, and compute the cheap rest again.

>>> fs.checkpoint_policies.dots.saves(torch.ops.aten.mm), fs.checkpoint_policies.dots.saves(torch.ops.aten.exp)
(True, False)
"""


def __dir__() -> list[str]:
    return sorted(__all__)
