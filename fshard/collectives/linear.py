"""Linear collectives, and the one autograd function that makes all of them differentiable.

A collective is a linear map of the values of all ranks together. A *varying* value differs between ranks. An
*invariant* value is a single one, and every rank holds a copy. These types decide the adjoint (``jax.shard_map`` with
``check_vma=True``; Megatron-LM's f and g):

=============== ====================== =========================================================
``LinearSum``         varying -> invariant   ``Vary``
``Vary``        invariant -> varying   ``LinearSum``
``Gather``      varying -> varying     ``Scatter``
``Scatter``     varying -> varying     ``Gather``
``Collect``     varying -> invariant   ``LinearCut``
``LinearCut``         invariant -> varying   ``Collect``
``LinearExchange``    varying -> varying     ``LinearExchange``, the dims swapped
``LinearRagged``      varying -> varying     ``LinearRagged``, the numbers swapped
``Permute``     varying -> varying     ``Permute``, the pairs reversed
``Settle``      varying -> invariant   ``Once``
``Once``        invariant -> varying   ``Spread``
``Spread``      varying -> invariant   ``Once``
=============== ====================== =========================================================

Dims count from the end, so that a batch dim in front changes nothing.
"""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard.collectives import raw
from fshard.collectives.ranks import Ranks
from fshard.collectives.raw import check_invariant
from fshard.collectives.scope import no_derivative, untraceable, wrapped
from fshard.torch_internals import DispatchModeKey, dispatch_mode, functorch, tracing_state

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LinearCollective(ABC):
    """A linear map of the values of a group's ranks."""

    name = "shard_map"
    """The function that users call, for errors."""
    sends = True
    """Whether ranks communicate for it."""
    group: Ranks

    @abstractmethod
    def start(self, x: Tensor) -> raw.Finish:
        """Start it on data."""

    @abstractmethod
    def transpose(self) -> "LinearCollective":
        """Its adjoint."""

    def pushforward(self) -> "LinearCollective":
        """The map of tangents: a linear map is its own derivative."""
        return self

    def shape(self, shape: Shape) -> Shape:
        """The shape of its result."""
        return shape

    def begin(self, x: Tensor) -> raw.Finish:
        """Start it on data; a fake tensor gives a fake result."""
        check_plain(x, self.name)
        if is_fake(x):
            self._foresee(x)
            return lambda: x.new_empty(self.shape(tuple(x.shape)))
        return self.start(x)

    def run(self, x: Tensor) -> Tensor:
        """Its result on data."""
        return self.begin(x)()

    def _foresee(self, x: Tensor) -> None:
        """Let the trace that made a fake tensor know the communicator that real ones would need."""
        note = getattr(getattr(x, "fake_mode", None), "foresee", None)
        if self.sends and note is not None:
            note(self.group.mesh, self.group.axes)


class Linear(torch.autograd.Function):
    """A linear collective under every transform of torch.func: each rule applies this function again."""

    @staticmethod
    def forward(x: Tensor, op: LinearCollective) -> Tensor:
        return op.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return again(grad, ctx.op.transpose()), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return again(tangent, ctx.op.pushforward())

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, op: LinearCollective) -> tuple[Tensor, int]:
        """One collective for the whole batch."""
        return again(x.movedim(in_dims[0], 0), op), 0


def again(x: Tensor, op: LinearCollective) -> Tensor:
    """A collective inside of a rule: alone, since PyTorch does not differentiate other operators there once more."""
    result: Tensor = Linear.apply(x, op)  # type: ignore[no-untyped-call]
    return result


def apply(x: Tensor, op: LinearCollective) -> Tensor:
    """A linear collective of a tensor, differentiable."""
    kinds = [level.key() for level in functorch.get_interpreter_stack() or ()]
    if op.sends and functorch.TransformType.Jvp in kinds and functorch.TransformType.Vmap in kinds:
        # PyTorch makes a batch of a tangent whose memory lies otherwise than its primal's, on some ranks and not on
        # others. Times a one of the primal's batch, all of them are.
        x = x * x.new_ones(())
    return again(x, op)


@dataclass(frozen=True)
class LinearSum(LinearCollective):
    """The sum over ranks."""

    name = "psum"

    def start(self, x: Tensor) -> raw.Finish:
        return raw.sum_all(self.group, x)

    def transpose(self) -> LinearCollective:
        """The cotangent of a sum is that of each term."""
        return Vary(self.group)


@dataclass(frozen=True)
class Vary(LinearCollective):
    """The copies of one value as separate values."""

    name = "pvary"
    sends = False

    def start(self, x: Tensor) -> raw.Finish:
        return x.clone

    def transpose(self) -> LinearCollective:
        """The cotangent of a value is the sum over those of its copies."""
        return LinearSum(self.group)


@dataclass(frozen=True)
class Gather(LinearCollective):
    """The tensors of all ranks, concatenated along a dim."""

    name = "all_gather"
    dim: int

    def start(self, x: Tensor) -> raw.Finish:
        rows = raw.gather(self.group, x)
        return lambda: _join(rows(), self.dim)

    def shape(self, shape: Shape) -> Shape:
        return _scaled(shape, self.dim, self.group.size, 1)

    def transpose(self) -> LinearCollective:
        """The sum of each slice, on the rank that it came from."""
        return Scatter(self.group, self.dim)


@dataclass(frozen=True)
class Scatter(LinearCollective):
    """This rank's slice along a dim of the sum over ranks."""

    name = "psum_scatter"
    dim: int

    def start(self, x: Tensor) -> raw.Finish:
        return raw.scatter_sum(self.group, _rows(x, self.dim, self.group.size))

    def shape(self, shape: Shape) -> Shape:
        return _scaled(shape, self.dim, 1, self.group.size)

    def transpose(self) -> LinearCollective:
        return Gather(self.group, self.dim)


@dataclass(frozen=True)
class Collect(Gather):
    """``Gather`` with an invariant result."""

    def transpose(self) -> LinearCollective:
        return LinearCut(self.group, self.dim)


@dataclass(frozen=True)
class LinearCut(Scatter):
    """This rank's slice along a dim."""

    name = "cut"
    sends = False

    def start(self, x: Tensor) -> raw.Finish:
        return _rows(x, self.dim, self.group.size)[self.group.index].clone

    def transpose(self) -> LinearCollective:
        return Collect(self.group, self.dim)


@dataclass(frozen=True)
class LinearExchange(LinearCollective):
    """Slices along one dim, one for each rank, concatenated along another dim where they arrive."""

    name = "all_to_all"
    split: int
    concat: int

    def start(self, x: Tensor) -> raw.Finish:
        rows = raw.exchange(self.group, _rows(x, self.split, self.group.size))
        return lambda: _join(rows(), self.concat)

    def shape(self, shape: Shape) -> Shape:
        return _scaled(_scaled(shape, self.split, 1, self.group.size), self.concat, self.group.size, 1)

    def transpose(self) -> LinearCollective:
        return LinearExchange(self.group, self.concat, self.split)


@dataclass(frozen=True)
class LinearRagged(LinearCollective):
    """Rows, along the dim before the last one, to ranks in unequal numbers."""

    name = "ragged_all_to_all"
    send: tuple[int, ...]
    receive: tuple[int, ...]

    def start(self, x: Tensor) -> raw.Finish:
        rows = raw.ragged(self.group, x.movedim(-2, 0), self.send, self.receive)
        return lambda: rows().movedim(0, -2)

    def shape(self, shape: Shape) -> Shape:
        return (*shape[:-2], sum(self.receive), shape[-1])

    def transpose(self) -> LinearCollective:
        return LinearRagged(self.group, self.receive, self.send)


@dataclass(frozen=True)
class Permute(LinearCollective):
    """Each target gets the tensor of its source, other ranks zeros."""

    name = "ppermute"
    pairs: tuple[tuple[int, int], ...]

    def start(self, x: Tensor) -> raw.Finish:
        return raw.permute(self.group, x, self.pairs)

    def transpose(self) -> LinearCollective:
        return Permute(self.group, tuple((target, source) for source, target in self.pairs))


@dataclass(frozen=True)
class Settle(LinearCollective):
    """Equal values of all ranks as one value, compared if ``check``; ``label`` names them in the error.

    ``Spread`` restricted to equal values, so both have the same adjoint.
    """

    label: str
    check: bool

    def start(self, x: Tensor) -> raw.Finish:
        if self.check:
            check_invariant(self.group, x, self.label)
        return x.clone

    def transpose(self) -> LinearCollective:
        """The whole cotangent on one rank."""
        return Once(self.group)


@dataclass(frozen=True)
class Once(LinearCollective):
    """The value on the first rank, zeros on all others."""

    sends = False

    def start(self, x: Tensor) -> raw.Finish:
        return lambda: x.clone() if self.group.index == 0 else torch.zeros_like(x)

    def transpose(self) -> LinearCollective:
        """The first rank's value, on all of them."""
        return Spread(self.group)


@dataclass(frozen=True)
class Spread(LinearCollective):
    """The value of the first rank, on all of them."""

    def start(self, x: Tensor) -> raw.Finish:
        # A sum would mix in the other ranks' infinities.
        rows = raw.gather(self.group, x)
        return lambda: rows()[0].clone()

    def transpose(self) -> LinearCollective:
        """Only the first rank's value counted."""
        return Once(self.group)


@dataclass(frozen=True)
class Max(LinearCollective):
    """The maximum over ranks. It is not linear, and has no derivative: the rank of the maximum is unknown here."""

    name = "pmax"

    def start(self, x: Tensor) -> raw.Finish:
        return raw.max_all(self.group, x)

    def transpose(self) -> LinearCollective:
        raise no_derivative()

    def pushforward(self) -> LinearCollective:
        raise no_derivative()


def differentiable(x: Any) -> bool:
    """Tell whether a value is a tensor that gradients flow through."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def check_plain(x: Tensor, what: str) -> None:
    """Refuse tensors that hold no data: wrappers of transforms, and tensors traced into a graph.

    Raises:
        TransformError: it is one.
    """
    if functorch.is_functorch_wrapped_tensor(x):
        raise wrapped(what)
    proxy = dispatch_mode(DispatchModeKey.PROXY)
    if proxy is not None or tracing_state() is not None:
        raise untraceable(what)


def is_fake(x: Tensor) -> bool:
    """Tell whether a tensor has a shape and no data."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # its import takes a second
    return fakes is not None and isinstance(x, fakes.FakeTensor)


def _rows(x: Tensor, dim: int, count: int) -> Tensor:
    """``(count, ...)``: the slices along a dim."""
    at = x.dim() + dim
    return x.reshape(*x.shape[:at], count, x.shape[at] // count, *x.shape[at + 1 :]).movedim(at, 0)


def _join(rows: Tensor, dim: int) -> Tensor:
    """The inverse of ``_rows``."""
    return rows.movedim(0, dim - 1).flatten(dim - 1, dim)


def _scaled(shape: Shape, dim: int, times: int, parts: int) -> Shape:
    out = list(shape)
    out[dim] = out[dim] * times // parts
    return tuple(out)
