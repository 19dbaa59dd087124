"""One tensor of the parameter tree, with all that rules say of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fshard.model.precision import Casting, Precision, Products, make_casting
from fshard.sharding.kinds import Kinds
from fshard.sharding.mesh import Axes
from fshard.sharding.rules import Align
from fshard.sharding.spec import P, Shape, axes_of
from fshard.sharding.wire import Wire, WireFormat


class ReadAs(NamedTuple):
    """The dtypes in which units read a leaf.

    Attributes:
        precision: as rules say.
        unscaled: why the leaf cannot be multiplied in float8; empty if it can.
    """

    precision: Precision = Precision()
    unscaled: str = ""


@dataclass(frozen=True)
class Leaf:
    """One tensor of the parameter tree, and where it lives.

    ``shape`` is the whole leaf's, ``compute_shape`` that of the tensor which a unit reads on one rank. ``opt`` is the
    spec of the optimizer's state, None for the leaf's own; ``kinds`` names the memory spaces of both; ``wire`` the
    formats in which it travels, ``packed`` that in which it is kept. ``reading`` says in what units read it. It
    begins, and chunks of its group end, at
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
    reading: ReadAs = ReadAs()
    align: Align = None
    opt: P | None = None
    kinds: Kinds = Kinds()
    wire: Wire = Wire()
    packed: WireFormat | None = None
    grid: int = 1

    @property
    def products(self) -> Products | None:
        """The products of linear layers that read it, if not those of the dtype of compute."""
        return None if self.unscaled else self.precision.products

    @property
    def unscaled(self) -> str:
        """The reason why it cannot be multiplied in float8; empty if it can."""
        return self.reading.unscaled

    @property
    def precision(self) -> Precision:
        """The dtypes that rules ask for."""
        return self.reading.precision

    @property
    def row(self) -> int:
        """The elements of its rows, if these travel in float8, each with a scale; 0 if it travels otherwise."""
        exact = self.packed is not None or self.wire.gather is not None or self.kinds.hosted or self.dtype.itemsize == 1
        return 0 if exact or self.products is None or self.at_rest.flat is None else self.compute_shape[1]

    def read_in(self, precision: Precision) -> "Leaf":
        """The leaf, read in another precision."""
        return replace(self, reading=self.reading._replace(precision=precision))

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


def casting_of(default: Precision, leaves: Mapping[str, Leaf]) -> Casting | None:
    """New casts around the calls of units, for a plan's precision and its leaves; None if there are none."""
    float8 = frozenset(path for path, leaf in leaves.items() if leaf.products is not None)
    return make_casting(default, {path: leaf.precision for path, leaf in leaves.items()}, float8)
