"""Precision: the dtypes in which a step computes and communicates. Parameters and their state are never rounded."""

from dataclasses import KW_ONLY, dataclass, fields
from typing import Literal

import torch

from fshard.errors import PlanError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Gradients in float16 need ``fs.LossScale``, or small ones vanish silently."""

Products = Literal["float8_rowwise"]
"""The products of linear layers that are not those of the dtype of compute."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, as in FSDP2's ``MixedPrecisionPolicy``. Given to ``fs.make_plan(precision=)``.

    Parameters, optimizer state and gradient shards keep the dtype of the model, the master dtype. Only floating-point
    leaves are concerned.

    Args:
        compute: the dtype of the parameters that units read. Each rank casts its shard once an update, and gathers the
            result: with bfloat16 half the bytes. Units cast their own inputs. None: the master dtype.
        reduce: the dtype to which gradients are rounded before they are sent to be summed. Each rank adds the
            gradients that it receives to its shard in the master dtype, in the order of ranks; sums over replicas and
            microbatches are in the master dtype too. Replicas that exchange their shards, where that takes no more
            bytes than an all-reduce (in bfloat16: up to four replicas), round them once more. None: the master dtype.
        output: the dtype to which floating-point results of units are cast. None: not cast.
        inputs: whether floating-point arguments of units are cast to ``compute``.
        buffers: the dtype to which floating-point buffers are cast while a unit of a split module runs. Changed buffers
            return in their own dtype. None: not cast.
        products: ``"float8_rowwise"`` rounds the factors of linear layers (``F.linear``) inside of units to
            float8_e4m3, with a scale for each row: weights, inputs, and gradients of outputs. Gradients of weights are
            products in bfloat16. Only first derivatives can be taken. ``print(plan)`` says of which leaves it cannot be
            done. None: products in the dtype of compute.
        rounding: how updates of parameters kept in bfloat16 are rounded after an update in float32: ``"nearest"`` or
            ``"stochastic"``.

    ``output``, ``inputs`` and ``buffers`` apply to a unit if all of its leaves have this precision, or if the plan has
    it.

    Raises:
        PlanError: a dtype is not one of the four supported floating-point dtypes.

    >>> Precision(torch.bfloat16, torch.bfloat16)
    Precision(compute=torch.bfloat16, reduce=torch.bfloat16)
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    _: KW_ONLY
    inputs: bool = False
    buffers: torch.dtype | None = None
    products: Products | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={value!r}"
            for name in ("compute", "reduce", "output", "buffers")
            if (value := getattr(self, name)) is not None and value not in DTYPES
        ]
        if wrong:
            names = ", ".join(map(str, DTYPES))
            raise PlanError(f"fs.Precision({', '.join(wrong)}): give one of {names}, or None")
        if self.products not in (None, "float8_rowwise"):
            raise PlanError(f"fs.Precision(products={self.products!r}): give 'float8_rowwise' or None")
        if self.rounding not in ("nearest", "stochastic"):
            raise PlanError(f"fs.Precision(rounding={self.rounding!r}): give 'nearest' or 'stochastic'")
        if not isinstance(self.inputs, bool):
            raise PlanError(f"fs.Precision(inputs={self.inputs!r}): give True, to cast them to compute, or False")

    def __repr__(self) -> str:
        said = [f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"Precision({', '.join(said)})"

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which units read a leaf of this dtype."""
        return self.compute if self.compute is not None and dtype.is_floating_point else dtype

    def reduces_in(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a leaf of this dtype travel."""
        return self.reduce if self.reduce is not None and dtype.is_floating_point else dtype
