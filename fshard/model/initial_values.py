"""Initial values addressed by global index: a slice of a leaf, filled alone, equals that slice of the whole leaf.

``fs.init_state(plan, opt, init=[(r".*embed.weight", fs.init.normal(0.02)), ...])`` uses them by rules on paths.

An initializer is a frozen function ``(key, shape, index) -> values``. It computes in float64 and rounds once to
float32, so a value does not depend on how a mesh cuts the leaf. Names and meanings of arguments are those of
``torch.nn.init``; the numbers drawn are not, because torch's generators are sequential.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fshard.arguments import expect
from fshard.errors import PlanError
from fshard.model import philox

__all__ = [
    "Constant",
    "Initializer",
    "Normal",
    "Scaled",
    "TruncNormal",
    "Uniform",
    "ZeroRow",
    "constant",
    "kaiming_normal",
    "kaiming_uniform",
    "normal",
    "ones",
    "trunc_normal",
    "uniform",
    "xavier_normal",
    "xavier_uniform",
    "zeros",
]

Mode = Literal["fan_in", "fan_out", "fan_avg"]

CHUNK = 1 << 20
"""The elements that ``fill`` makes at once, with some tens of megabytes of temporary memory."""


class Initializer(Protocol):
    """A function that gives a leaf its first values.

    >>> def ramp(key, shape, index):
    ...     return index.float()
    >>> plan = fs.make_plan({"w": torch.empty(2, 2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> fs.init_state(plan, init=[(".*", ramp)]).params["w"]
    tensor([0., 1., 2., 3.])
    """

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        """The values of a leaf at some positions.

        Args:
            key: 64 bits; ``philox.fold(seed, path)`` makes one.
            shape: the whole leaf's shape.
            index: int64, 1-D: positions in the flattened whole leaf.

        Returns:
            float32, 1-D, as long as ``index`` and on its device.
        """
        ...


@dataclass(frozen=True)
class Constant:
    """Every element is ``value``.

    >>> fs.init.Constant(3.0)(0, (2, 2), torch.arange(4))
    tensor([3., 3., 3., 3.])
    """

    value: float

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        return torch.full(index.shape, self.value, dtype=torch.float32, device=index.device)


@dataclass(frozen=True)
class Uniform:
    """Uniform between ``low`` and ``high``.

    >>> whole, part = (fs.init.Uniform(-1.0, 1.0)(0, (4, 2), torch.arange(*ends)) for ends in ((8,), (4, 6)))
    >>> bool((whole[4:6] == part).all())
    True
    """

    low: float
    high: float

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        drawn = philox.uniform(key, index)
        return drawn.mul_(self.high - self.low).add_(self.low).float()


@dataclass(frozen=True)
class Normal:
    """Normal with this mean and standard deviation.

    >>> fs.init.normal(0.02)
    Normal(std=0.02, mean=0.0)
    """

    std: float
    mean: float = 0.0

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        return philox.normal(key, index).mul_(self.std).add_(self.mean).float()


@dataclass(frozen=True)
class TruncNormal:
    """Normal with this mean and standard deviation, cut off at the values ``a`` and ``b``.

    >>> fs.init.trunc_normal(0.02)
    TruncNormal(std=0.02, mean=0.0, a=-2.0, b=2.0)
    """

    std: float
    mean: float
    a: float
    b: float

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        low, high = self._mass()
        # The middle of each of the 2**32 cells: the inverse error function is infinite at the ends.
        middle = philox.uniform(key, index).add_(2.0**-33)
        drawn = middle.mul_(high - low).add_(low).erfinv_().mul_(self.std * math.sqrt(2)).add_(self.mean)
        return drawn.clamp_(self.a, self.b).float()

    def _mass(self) -> tuple[float, float]:
        """The error function at both cuts: twice the mass below each, minus one."""
        scale = self.std * math.sqrt(2)
        return math.erf((self.a - self.mean) / scale), math.erf((self.b - self.mean) / scale)


@dataclass(frozen=True)
class Scaled:
    """Variance scaling: standard deviation ``gain / sqrt(fan)``, the fan read from the leaf's whole shape.

    >>> fs.init.xavier_uniform()
    Scaled(gain=1.0, mode='fan_avg', law='uniform')
    """

    gain: float
    mode: Mode
    law: Literal["uniform", "normal"]

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        if len(shape) < 2:
            raise PlanError(
                f"a leaf of shape {list(shape)} has no fan, which takes two dims. Give such leaves one without, "
                f'such as init=[(r".*bias", fs.init.zeros()), ...]'
            )
        # As torch.nn.init counts it: dim 0 is out, dim 1 is in, the rest is the receptive field.
        fans = {"fan_in": shape[1], "fan_out": shape[0], "fan_avg": (shape[0] + shape[1]) / 2}
        fan = fans[self.mode] * math.prod(shape[2:])
        std = self.gain / math.sqrt(fan) if fan > 0 else 0.0
        if self.law == "normal":
            return Normal(std)(key, shape, index)
        bound = math.sqrt(3) * std
        return Uniform(-bound, bound)(key, shape, index)


@dataclass(frozen=True)
class ZeroRow:
    """Another initializer, with one row (a slice along dim 0) of zeros: the padding row of an embedding.

    >>> inner = fs.init.ones()
    >>> fs.init.ZeroRow(inner, row=1)(0, (2, 3), torch.arange(6))
    tensor([1., 1., 1., 0., 0., 0.])
    """

    inner: Initializer
    row: int

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        width = math.prod(shape[1:])
        return self.inner(key, shape, index).masked_fill_(index // width == self.row % shape[0], 0.0)


def zeros() -> Initializer:
    """All zeros.

    >>> fs.init.zeros()(0, (4,), torch.arange(2))
    tensor([0., 0.])
    """
    return Constant(0.0)


def ones() -> Initializer:
    """All ones.

    >>> fs.init.ones()(0, (4,), torch.arange(2))
    tensor([1., 1.])
    """
    return Constant(1.0)


def constant(value: float) -> Initializer:
    """All ``value``.

    Args:
        value: the value, rounded to the dtype of the leaf.

    >>> fs.init.constant(0.5)(0, (4,), torch.arange(2))
    tensor([0.5000, 0.5000])
    """
    _expect_numbers("constant", value=value)
    return Constant(value)


def uniform(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Uniform in ``[low, high)``, before rounding to float32.

    Args:
        low: the least value.
        high: the end of the range.

    >>> drawn = fs.init.uniform(2.0, 3.0)(0, (4, 8), torch.arange(32))
    >>> bool(((drawn >= 2) & (drawn <= 3)).all())
    True
    """
    _expect_numbers("uniform", low=low, high=high)
    return Uniform(low, high)


def normal(std: float = 1.0, mean: float = 0.0) -> Initializer:
    """Normal with this standard deviation and mean.

    Args:
        std: the standard deviation.
        mean: the mean.

    >>> fs.init.normal(std=0.02)(1, (4, 8), torch.arange(3, 6)).shape
    torch.Size([3])
    """
    _expect_numbers("normal", std=std, mean=mean)
    return Normal(std, mean)


def trunc_normal(std: float = 1.0, a: float = -2.0, b: float = 2.0, mean: float = 0.0) -> Initializer:
    """Normal, cut off at ``a`` and ``b``: values, as in ``torch.nn.init``, and not multiples of ``std``.

    Args:
        std: the standard deviation of what is cut off.
        a: the least value.
        b: the largest value.
        mean: the mean of what is cut off.

    Raises:
        PlanError: ``a`` is not below ``b``, ``std`` is not above 0, or the cut leaves no mass.

    >>> drawn = fs.init.trunc_normal(std=0.02, a=-0.04, b=0.04)(0, (4, 8), torch.arange(32))
    >>> bool((drawn.abs() <= 0.04).all())
    True
    """
    _expect_numbers("trunc_normal", std=std, a=a, b=b, mean=mean)
    if not a < b or std <= 0:
        raise PlanError(f"trunc_normal needs a < b and std > 0, but got std={std}, a={a}, b={b}")
    made = TruncNormal(std, mean, a, b)
    low, high = made._mass()
    if high - low < 1e-6:
        raise PlanError(f"trunc_normal: [{a}, {b}] lies too far from mean {mean} for std {std}: it holds no mass")
    return made


def kaiming_uniform(a: float = 0.0, mode: Mode = "fan_in") -> Initializer:
    """He et al. 2015, uniform, for leaves of two dims or more.

    Args:
        a: the negative slope of the leaky ReLU that follows.
        mode: ``"fan_in"``, ``"fan_out"`` or ``"fan_avg"``.

    >>> fs.init.kaiming_uniform()(0, (4, 8), torch.arange(3)).shape
    torch.Size([3])
    """
    return _kaiming("kaiming_uniform", a, mode, "uniform")


def kaiming_normal(a: float = 0.0, mode: Mode = "fan_in") -> Initializer:
    """He et al. 2015, normal, for leaves of two dims or more.

    Args:
        a: the negative slope of the leaky ReLU that follows.
        mode: ``"fan_in"``, ``"fan_out"`` or ``"fan_avg"``.

    >>> fs.init.kaiming_normal()(0, (4, 8), torch.arange(3)).shape
    torch.Size([3])
    """
    return _kaiming("kaiming_normal", a, mode, "normal")


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Glorot and Bengio 2010, uniform, for leaves of two dims or more.

    Args:
        gain: a factor for what follows the layer, as ``torch.nn.init.calculate_gain`` gives it.

    >>> fs.init.xavier_uniform(gain=2.0)(0, (4, 8), torch.arange(3)).shape
    torch.Size([3])
    """
    _expect_numbers("xavier_uniform", gain=gain)
    return Scaled(gain, "fan_avg", "uniform")


def xavier_normal(gain: float = 1.0) -> Initializer:
    """Glorot and Bengio 2010, normal, for leaves of two dims or more.

    Args:
        gain: a factor for what follows the layer, as ``torch.nn.init.calculate_gain`` gives it.

    >>> fs.init.xavier_normal(gain=2.0)(0, (4, 8), torch.arange(3)).shape
    torch.Size([3])
    """
    _expect_numbers("xavier_normal", gain=gain)
    return Scaled(gain, "fan_avg", "normal")


def fill(
    initializer: Initializer,
    key: int,
    shape: tuple[int, ...],
    index: Tensor | range,
    out: Tensor | None = None,
) -> Tensor:
    """The values of a leaf at some positions, made in chunks, so that temporaries do not grow with the leaf.

    Arguments are those of an ``Initializer``, but ``index`` may be a ``range``, which takes no memory. Values are
    written to ``out``: 1-D, as long as ``index``, any floating dtype; by default a new float32 tensor.
    """
    if out is None:
        device = index.device if isinstance(index, Tensor) else None
        out = torch.empty(len(index), dtype=torch.float32, device=device)
    if out.shape != (len(index),):
        raise ValueError(f"out has shape {tuple(out.shape)}, but index has {len(index)} positions")
    with torch.no_grad():
        for start in range(0, len(index), CHUNK):
            part = index[start : start + CHUNK]
            if isinstance(part, range):
                part = torch.arange(part.start, part.stop, part.step, dtype=torch.int64, device=out.device)
            out[start : start + len(part)] = initializer(key, tuple(shape), part)
    return out


def _expect_numbers(name: str, **given: float) -> None:
    expect(f"fs.init.{name}", [(key, value, (int, float), "a number") for key, value in given.items()])


def _kaiming(name: str, a: float, mode: Mode, law: Literal["uniform", "normal"]) -> Initializer:
    _expect_numbers(name, a=a)
    if mode not in ("fan_in", "fan_out", "fan_avg"):
        raise PlanError(f"fs.init.{name}(mode={mode!r}): give 'fan_in', 'fan_out' or 'fan_avg'")
    return Scaled(math.sqrt(2 / (1 + a * a)), mode, law)


def __dir__() -> list[str]:
    return sorted(__all__)
