"""Random numbers addressed by position: a value depends on the key and the index alone.

The generator is Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011), written in int64 tensor operations. One counter gives four 32-bit words; element ``i`` of a draw takes word
``i % 4`` of counter ``i // 4``. A slice of a draw is therefore the draw of the slice, wherever it is made.
"""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]
Key = int | tuple[Tensor, Tensor]
"""64 bits: an integer, or its low and high 32-bit words as int64 tensors that broadcast with the counter."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def block(device: torch.device) -> int:
    """The counters that are drawn at once, which bounds the temporaries: a dozen int64 tensors of as many elements.

    On the host the working set of the rounds stays in a core's second-level cache. A kernel of a device that moves 8 or
    16 MiB takes some microseconds, as long as its launch: smaller blocks would leave the device idle between kernels,
    and larger ones would take memory, here 100 MB, for nothing.
    """
    return 1 << 15 if device.type == "cpu" else 1 << 20


def fold(seed: int, path: str) -> int:
    """The key of one named draw, such as of a leaf: 64 bits, the same on every machine and in every version.

    >>> fold(0, "head.weight") == fold(0, "head.weight") != fold(1, "head.weight")
    True
    """
    digest = hashlib.sha256(f"fshard:{seed}:{path}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def philox(key: Key, counter: Tensor, stream: int = 0) -> Words:
    """Philox4x32-10: four words in ``[0, 2**32)``, int64, of the shape of ``counter`` broadcast with the key.

    ``counter`` is int64: words 0 and 1 of the 128-bit counter (word 0 is the low half). ``stream``, 64 bits, is words 2
    and 3.

    >>> [hex(word.item()) for word in philox(0, torch.zeros(1, dtype=torch.int64))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    k0, k1 = (key & _MASK, (key >> 32) & _MASK) if isinstance(key, int) else key
    if isinstance(k0, Tensor):
        # The rounds write in place, so the words must have the key's shape, and vmap's batch dim, from the start.
        counter = counter + (k0 ^ k0)
    c0 = counter & _MASK
    c1 = (counter >> 32) & _MASK
    c2 = torch.full_like(counter, stream & _MASK)
    c3 = torch.full_like(counter, (stream >> 32) & _MASK)
    for _ in range(_ROUNDS):
        # A product wraps modulo 2**64, which keeps all of its bits; >> copies the sign, so high halves are masked.
        # Low halves (c1, c3) stay dirty above bit 31: they are only xored into words that are masked afterwards.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = p1, p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1.bitwise_and_(_MASK), c2, c3.bitwise_and_(_MASK)


def blocks(key: Key, counter: Tensor, finish: Callable[[Words], Tensor]) -> Tensor:
    """``finish`` of the words of 1-D counters, ``(n, 4)``, in blocks whose temporaries are bounded."""
    size = block(counter.device)
    if counter.numel() <= size or torch.compiler.is_compiling():
        return finish(philox(key, counter))
    return torch.cat([finish(philox(key, part)) for part in torch.split(counter, size)])


def runs(key: Key, begin: Tensor, length: int, finish: Callable[[Words], Tensor]) -> Tensor:
    """The elements of a draw at runs of positions: ``(len(begin), length)``.

    The host knows how many counters a run of this length can touch, so it need not wait for the positions.

    Args:
        begin: where each run begins, int64, 1-D.
        length: of each run.
        finish: makes elements of words, ``(n, 4)``.
    """
    width, most = (length + 6) // 4, block(begin.device)
    if not torch.compiler.is_compiling():
        if width > most:
            cuts = range(0, length, 4 * most - 6)
            return torch.cat([runs(key, begin + at, min(cuts.step, length - at), finish) for at in cuts], 1)
        if width * len(begin) > most:
            return torch.cat([runs(key, part, length, finish) for part in torch.split(begin, most // width)])
    counters = (begin >> 2).unsqueeze(1) + torch.arange(width, device=begin.device)
    drawn = finish(philox(key, counters.view(-1))).view(len(begin), 4 * width)
    return drawn.gather(1, (begin & 3).unsqueeze(1) + torch.arange(length, device=begin.device))


def integers(words: Words) -> Tensor:
    """The words themselves, int64, in a new last dim of 4."""
    return torch.stack(words, -1)


def uniform(key: int, index: Tensor) -> Tensor:
    """Uniform numbers in ``[0, 1)``, multiples of ``2**-32``: float64, of the shape of ``index``.

    ``index`` holds the positions wanted, in any order: int64, 1-D, not negative. The host waits for them: this is for
    initial values, and a step uses ``runs``.

    >>> whole = uniform(7, torch.arange(100))
    >>> bool((uniform(7, torch.arange(13, 57)) == whole[13:57]).all())
    True
    """
    return _draw(key, index, lambda words: integers(words).double().mul_(2.0**-32))


def normal(key: int, index: Tensor) -> Tensor:
    """As ``uniform``: standard normal numbers by the Box-Muller transform, at most ``sqrt(64 ln 2)``, about 6.66."""
    return _draw(key, index, to_normal)


def to_normal(words: Words) -> Tensor:
    """Standard normal numbers from words, float64, in a new last dim of 4."""
    out = []
    for pair in (0, 2):
        # The + 1 keeps the logarithm finite: u lies in (0, 1].
        radius = words[pair].double().add_(1).mul_(2.0**-32).log_().mul_(-2).sqrt_()
        angle = words[pair + 1].double().mul_(2 * math.pi * 2.0**-32)
        out += [radius * angle.cos(), radius.mul_(angle.sin_())]
    return torch.stack(out, -1)


def _draw(key: int, index: Tensor, finish: Callable[[Words], Tensor]) -> Tensor:
    """Draw each counter of these positions once for a run of positions, and take the positions."""
    counters, run = torch.unique_consecutive(index >> 2, return_inverse=True)
    drawn = blocks(key, counters, finish)
    return drawn.view(-1).take(run.mul_(4).add_(index & 3))
