"""Random numbers from keys: ``fs.random``. A value depends on its key and its global position, and on nothing else.

A key is a plain tensor, made by ``key(seed)`` and multiplied by ``split`` and ``fold_in`` (``jax.random``). The element
at row-major position ``i`` of a draw is a function of ``(key, i)``, so a rank that holds rows 8 to 12 of a batch draws
just those, with ``start=8``, and gets what any other cut of the batch gives these rows. Drawing again gives the same
numbers: in a recomputation, in another microbatch, on another mesh.

Keys go through ``torch.vmap``, ``grad``, ``jvp`` and ``torch.compile`` like any tensor; a vmap over keys draws for each
of them. Under a vmap over ``x`` alone, ``dropout(key, x)`` drops the same places of each ``x``: fold the sample's
number into the key, or map over split keys.

The generator is Philox4x32-10 (Salmon et al., SC 2011), in integer tensor operations on every device. PyTorch's own
kernels for it, in ``torch.func._random``, are private and for CUDA alone, and are not used.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from fshard.arguments import kind
from fshard.errors import PlanError
from fshard.model.philox import Words, blocks, integers, philox, runs, to_normal
from fshard.model.reuse import Reuse

__all__ = ["bernoulli", "checked", "dropout", "fold_in", "key", "normal", "split", "uniform"]

Start = int | Tensor | Sequence[int | Tensor]

_MASK = 0xFFFFFFFF
_SPLIT, _FOLD = 1, 2  # streams of Philox; draws are stream 0
_BITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def key(seed: int | Tensor, *, device: torch.device | str | None = None) -> Tensor:
    """A key from a seed.

    Args:
        seed: an int, of which 64 bits count, or a 0-dim int64 tensor.
        device: the device of the key and of draws from it. By default that of a tensor ``seed``.

    Returns:
        int64, shape ``(2,)``: two 32-bit words.

    Raises:
        PlanError: ``seed`` is not an integer.

    >>> fs.random.key(7)
    tensor([7, 0])
    """
    if not isinstance(seed, SupportsIndex) or isinstance(seed, Tensor) and (seed.ndim or seed.is_floating_point()):
        raise PlanError(f"fs.random.key(seed={seed!r}): a seed is an int, or a 0-dim tensor of an integer dtype")
    if isinstance(seed, Tensor):
        low = seed.to(device=device, dtype=torch.int64)
        return torch.stack((low & _MASK, (low >> 32) & _MASK), -1)
    return torch.stack([_number(word, device) for word in (seed & _MASK, (seed >> 32) & _MASK)])


def split(key: Tensor, num: int = 2) -> Tensor:
    """New keys from one (``jax.random.split``).

    Args:
        key: a key.
        num: the number of new keys.

    Returns:
        int64, ``(num, 2)``: a key in each row.

    Raises:
        PlanError: ``key`` is not a key, or ``num`` is not an int from 0.

    >>> first, second = fs.random.split(fs.random.key(0))
    >>> bool((first == second).all()), fs.random.split(fs.random.key(0), 3).shape
    (False, torch.Size([3, 2]))
    """
    pair = check_key(key)
    if not isinstance(num, int) or num < 0:
        raise PlanError(f"fs.random.split(num={num!r}): give the number of keys, an int")
    low, high, *_ = philox(pair, torch.arange(num, device=key.device), _SPLIT)
    return torch.stack((low, high), -1)


def fold_in(key: Tensor, data: int | Tensor) -> Tensor:
    """The key of a part of something: a step, a layer, a sample (``jax.random.fold_in``).

    Args:
        key: a key.
        data: an int or a 0-dim integer tensor, 64 bits.

    Returns:
        A key.

    Raises:
        PlanError: ``key`` is not a key, or ``data`` is not an integer.

    >>> of_step = fs.random.fold_in(fs.random.key(0), 12)
    >>> torch.vmap(fs.random.fold_in, (None, 0))(of_step, torch.arange(3)).shape  # one a sample
    torch.Size([3, 2])
    """
    pair = check_key(key)
    if not isinstance(data, int | Tensor):
        raise PlanError(f"fs.random.fold_in(data={data!r}): give an int, or a 0-dim tensor of an integer dtype")
    if not isinstance(data, Tensor):
        data = _number((data + (1 << 63)) % (1 << 64) - (1 << 63), key.device)
    low, high, *_ = philox(pair, data.to(torch.int64), _FOLD)
    return torch.stack((low, high), -1)


def uniform(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    *,
    start: Start = 0,
    of: Sequence[int] | None = None,
) -> Tensor:
    """Uniform numbers in ``[0, 1)``.

    Args:
        key: a key.
        shape: the shape of the part to draw.
        dtype: floating; torch's default one if None. Values are multiples of ``2**-24`` in float32, ``2**-32`` in
            float64: those of another dtype are the same, rounded down.
        start: where the part begins in the whole draw: the first row, or an index for each dim; ints or 0-dim tensors.
        of: the shape of the whole draw. Needed only for a part that is no run of whole rows.

    Raises:
        PlanError: ``key`` is not a key, or the part does not lie in the whole.

    >>> whole = fs.random.uniform(fs.random.key(0), (6, 4))
    >>> bool((fs.random.uniform(fs.random.key(0), (2, 4), start=3) == whole[3:5]).all())
    True
    >>> bool((fs.random.uniform(fs.random.key(0), (6, 2), start=(0, 1), of=(6, 4)) == whole[:, 1:3]).all())
    True
    """
    dtype = _floating(dtype)
    words = _draw(key, DrawnBox.of(shape, start, of), integers)
    bits = _BITS[dtype]
    return (words >> (32 - bits)).to(dtype) * 2.0**-bits


def normal(
    key: Tensor,
    shape: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    *,
    start: Start = 0,
    of: Sequence[int] | None = None,
) -> Tensor:
    """Standard normal numbers, by the Box-Muller transform in float64. Arguments are those of ``uniform``.

    Args:
        key: a key.
        shape: the shape of the part to draw.
        dtype: floating; torch's default one if None.
        start: where the part begins in the whole draw.
        of: the shape of the whole draw.

    >>> rows = fs.random.normal(fs.random.key(0), (6, 4))
    >>> bool((fs.random.normal(fs.random.key(0), (2, 4), start=3) == rows[3:5]).all())
    True
    """
    dtype = _floating(dtype)
    return _draw(key, DrawnBox.of(shape, start, of), to_normal).to(dtype)


def bernoulli(
    key: Tensor,
    p: float | Tensor = 0.5,
    shape: Sequence[int] | None = None,
    *,
    start: Start = 0,
    of: Sequence[int] | None = None,
) -> Tensor:
    """True with probability ``p``, to within ``2**-32``.

    Args:
        key: a key.
        p: a number, or a tensor that broadcasts with ``shape``.
        shape: the shape of the part to draw; ``p``'s own if None.
        start, of: as in ``uniform``.

    Returns:
        bool.

    Raises:
        PlanError: as for ``uniform``; or ``p`` is not a number, or one outside of 0 to 1.

    >>> heads = fs.random.bernoulli(fs.random.key(0), 0.5, (1000,))
    >>> heads.dtype, 450 < int(heads.sum()) < 550
    (torch.bool, True)
    """
    if not isinstance(p, int | float | Tensor):
        raise PlanError(
            f"fs.random.bernoulli(p={p!r}): give a probability, a number or a tensor; the shape comes after it"
        )
    if not isinstance(p, Tensor) and not 0 <= p <= 1:
        raise PlanError(f"fs.random.bernoulli(p={p!r}): a probability is from 0 to 1")
    if shape is None:
        shape = p.shape if isinstance(p, Tensor) else ()
    words = _draw(key, DrawnBox.of(shape, start, of), integers)
    return words.double() < (p.detach().double() if isinstance(p, Tensor) else p) * 2.0**32


def dropout(key: Tensor, x: Tensor, p: float = 0.5, *, start: Start = 0, of: Sequence[int] | None = None) -> Tensor:
    """Zero each element with probability ``p`` and divide the others by ``1 - p`` (``torch.nn.functional.dropout``).

    Args:
        key: a key; a new one for each layer and step.
        x: any floating tensor.
        p: from 0 to 1.
        start, of: where ``x`` lies in the global tensor, as in ``uniform``: ``start=rank * x.shape[0]`` for a batch
            that is cut into equal parts.

    >>> x = torch.ones(4, 3)
    >>> bool((fs.random.dropout(fs.random.key(1), x)[2:] == fs.random.dropout(fs.random.key(1), x[2:], start=2)).all())
    True
    """
    if not isinstance(p, int | float) or not 0 <= p <= 1:
        raise PlanError(f"dropout(p={p!r}): a probability lies between 0 and 1")
    check_key(key)
    if not isinstance(x, Tensor):
        raise PlanError(f"fs.random.dropout(key, x): x is {kind(x)}, not a tensor")
    keep = bernoulli(key.to(x.device), 1 - p, x.shape, start=start, of=of)
    return torch.where(keep, x / (1 - p) if p < 1 else x, 0)


def checked() -> Reuse:
    """A scope in which drawing the same positions from the same key twice is an error, as in ``jax_debug_key_reuse``.

    Slices of one draw may share a key; draws that overlap may not, and neither may two samples of a vmap. A draw
    inside of a backward is a recomputation, and is not counted. Keys whose values Python cannot read, as under
    ``torch.compile`` and on fake tensors, are not checked; nor are draws inside of ``fs.remat`` under a transform of
    ``torch.func``. The scope reads every key, so use it for debugging.

    Raises:
        KeyReuseError: at the second draw, with the places of both.

    >>> with fs.random.checked():
    ...     k1, k2 = fs.random.split(fs.random.key(0))
    ...     pair = fs.random.uniform(k1), fs.random.normal(k2)
    """
    return Reuse(_draw, draw_words)


@dataclass(frozen=True)
class DrawnBox:
    """A box in a draw. Dim 0 of ``whole`` is -1 if its length is not given."""

    shape: tuple[int, ...]
    start: tuple[int | Tensor, ...]
    whole: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], start: Start, whole: Sequence[int] | None) -> "DrawnBox":
        """The box that a caller named, checked."""
        shape = _ints("shape", shape)
        sizes = (-1, *shape[1:])[: len(shape)] if whole is None else _ints("of", whole)
        given = tuple(start) if isinstance(start, Sequence) else (start,)
        if isinstance(start, Sequence) and len(given) != len(shape) or not shape and isinstance(start, Tensor):
            raise PlanError(f"start={start!r} for the shape {list(shape)}: give the first row, or one index a dim")
        starts = (given + (0,) * len(shape))[: len(shape)]
        fits = len(sizes) == len(shape) and (bool(shape) or start in (0, ()))
        if not fits or not all(_inside(*box) for box in zip(starts, shape, sizes, strict=True)):
            raise PlanError(
                f"a part of shape {list(shape)} that begins at {list(starts) or start} does not lie in a draw of shape "
                f"{list(whole) if whole is not None else ['any', *shape[1:]]}: give start= and of= of the global tensor"
            )
        return DrawnBox(shape, starts, sizes)

    def first(self) -> int | Tensor | None:
        """The position of the first element of a run of whole rows; None if the box is no such run."""
        rows = not any(isinstance(first, Tensor) or first for first in self.start[1:])
        if not rows or self.shape[1:] != self.whole[1:]:
            return None
        return self.start[0] * math.prod(self.whole[1:]) if self.shape else 0

    def index(self, device: torch.device) -> Tensor:
        """The position of every element, 1-D."""
        at = torch.zeros((), dtype=torch.int64, device=device)
        for size, first, length in zip(self.shape, self.start, self.whole, strict=True):
            at = at.unsqueeze(-1) * length + (torch.arange(size, device=device) + first)
        return at.reshape(-1)


def _ints(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that a caller gave as ``name``, checked."""
    if not isinstance(sizes, Sequence) or any(not isinstance(n, int | torch.SymInt) for n in sizes):
        raise PlanError(f"{name}={sizes!r}: give a tuple of ints, such as (2, 3)")
    return tuple(sizes)


def _inside(first: int | Tensor, size: int, limit: int) -> bool:
    """Tell whether a range lies in a dim of this length; -1 stands for any."""
    if isinstance(first, Tensor):
        return limit == -1 or size <= limit
    return first >= 0 and (limit == -1 or first + size <= limit)


def _draw(key: Tensor, part: DrawnBox, finish: Callable[[Words], Tensor]) -> Tensor:
    """Draw the words of the part's positions, and convert them with ``finish``."""
    if has_torch_function_unary(key):  # ``checked()`` is one of those modes
        drawn: Tensor = handle_torch_function(_draw, (key,), key, part, finish)
        return drawn
    pair, device, n = check_key(key), key.device, math.prod(part.shape)
    first = part.first()
    if first is None:
        index = part.index(device)
        words = blocks(pair, index >> 2, finish)
        return words.gather(1, (index & 3).unsqueeze(1)).view(part.shape)
    if isinstance(first, Tensor):
        first = first.to(device=device, dtype=torch.int64)
        return runs(pair, first.view(1), n, finish).view(part.shape)
    words = blocks(pair, torch.arange(first >> 2, (first + n + 3) >> 2, device=device), finish)
    return words.reshape(-1)[first & 3 : (first & 3) + n].view(part.shape)


def draw_words(key: Tensor, part: DrawnBox, counters: Tensor) -> Tensor:
    """The words of these counters, int64, ``(len(counters), 4)``. They are part of a draw of words, for ``checked``."""
    if has_torch_function_unary(key):
        words: Tensor = handle_torch_function(draw_words, (key,), key, part, counters)
        return words
    return blocks(check_key(key), counters, integers)


def check_key(key: Any) -> tuple[Tensor, Tensor]:
    """The two words of a key. Anything but a key is refused."""
    if not isinstance(key, Tensor) or key.shape != (2,) or key.dtype != torch.int64:
        what = f"{key.dtype} of shape {list(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
        raise PlanError(
            f"a key is an int64 tensor of shape [2], this is {what}: make one with fs.random.key(seed), and map over "
            f"several keys with torch.vmap"
        )
    return key[0], key[1]


def _number(value: int, device: torch.device | str | None) -> Tensor:
    """An int on a device, by a kernel: a copy from the host would wait for the device."""
    return torch.full((), value, dtype=torch.int64, device=device)


def _floating(dtype: torch.dtype | None) -> torch.dtype:
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in _BITS:
        raise PlanError(f"dtype={dtype}: random numbers come as {', '.join(map(str, _BITS))}")
    return dtype


def __dir__() -> list[str]:
    return sorted(__all__)
