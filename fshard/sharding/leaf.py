"""One tensor of the parameter tree, with all that rules say of it."""

import math
from dataclasses import dataclass

import torch

from fshard.model.precision import Precision
from fshard.sharding.kinds import Kinds
from fshard.sharding.mesh import Axes
from fshard.sharding.rules import Align
from fshard.sharding.spec import P, Shape, axes_of
from fshard.sharding.wire import Wire, WireFormat


@dataclass(frozen=True)
class Leaf:
    """One tensor of the parameter tree, and where it lives.

    ``shape`` is the whole leaf's, ``compute_shape`` that of the tensor which a unit reads on one rank. ``opt`` is the
    spec of the optimizer's state, None for the leaf's own; ``kinds`` names the memory spaces of both; ``wire`` the
    formats in which it travels, ``packed`` that in which it is kept. It begins, and chunks of its group end, at
    multiples of ``grid`` elements.
    """

    path: str
    shape: Shape
    dtype: torch.dtype
    trainable: bool
    at_rest: P
    compute: P
    compute_shape: Shape
    aliases: tuple[str, ...] = ()
    precision: Precision = Precision()
    align: Align = None
    opt: P | None = None
    kinds: Kinds = Kinds()
    wire: Wire = Wire()
    packed: WireFormat | None = None
    grid: int = 1

    @property
    def opt_axes(self) -> Axes:
        """The axes that cut the optimizer state further than the leaf."""
        return () if self.opt is None else tuple(axis for axis in self.opt.axes if axis not in self.at_rest.axes)

    @property
    def numel(self) -> int:
        """The elements that a unit reads on one rank."""
        return math.prod(self.compute_shape)

    def nbytes(self, numel: int) -> int:
        """The bytes of a part of the leaf as it is kept, of so many elements."""
        if self.packed is None:
            return numel * self.dtype.itemsize
        return self.packed.nbytes(-(-numel // self.packed.block) * self.packed.block)

    @property
    def gather_axes(self) -> Axes:
        """The axes over which the leaf is gathered for compute."""
        return tuple(axis for axis in self.at_rest.axes if axis not in self.compute.axes)

    @property
    def gather_dim(self) -> int | None:
        """The tensor dim of its gather; None for a leaf that is flat-sharded or not gathered."""
        dims = [i for i, e in enumerate(self.at_rest.dims) if any(a in self.gather_axes for a in axes_of(e))]
        return dims[0] if dims else None
