"""The order of samples: which of them make up a global batch, as a function of a seed and the number of the batch."""

import functools
import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from fshard.errors import bad_arguments

SMALL = 1 << 16
"""Samples that are put in order by sorting hashes of them. More are put in order one by one, by a cipher."""

ROUNDS = 6
ODD, LATER = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9
"""Odd multipliers of a hash of 64 bits (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""


@dataclass(frozen=True)
class Order:
    """The samples of each global batch: a pure function of its number, the same on all ranks.

    ``order(n)`` gives the samples of batch ``n``, counted from 0 through all epochs. In each epoch every sample comes
    once, in an order that depends on the seed and the epoch alone. Any batch is found without those before it, in
    memory of the batch's size, so a run resumes at any place at once.

    Args:
        length: the samples of the data set.
        batch: the samples of a global batch, over all ranks.
        seed: of the shuffle.
        shuffle: whether each epoch has an order of its own; else samples come as they are numbered.
        partial: ``"drop"`` leaves out the samples of an epoch that fill no whole batch, which are others in each
            shuffled epoch; ``"keep"`` makes a smaller batch of them.

    Raises:
        PlanError: arguments out of range.

    >>> order = fs.data.Order(5, batch=2, seed=0)
    >>> order.batches, sorted(torch.cat([fs.data.Order(5, batch=2, partial="keep")(n) for n in range(3)]).tolist())
    (2, [0, 1, 2, 3, 4])
    """

    length: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    partial: str = "drop"

    def __post_init__(self) -> None:
        problems = []
        for name, least in (("length", 1), ("batch", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                problems.append(f"{name} = {value!r}: must be an int >= {least}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            problems.append(f"seed = {self.seed!r}: must be an int")
        if self.partial not in ("drop", "keep"):
            problems.append(f"partial = {self.partial!r}: must be 'drop' or 'keep'")
        if not problems and self.partial == "drop" and self.length < self.batch:
            problems.append(f"batch = {self.batch}: must not be above length = {self.length}, or each epoch is empty")
        if problems:
            raise bad_arguments("fs.data.Order", problems)

    @property
    def batches(self) -> int:
        """Batches in an epoch."""
        return self.length // self.batch if self.partial == "drop" else -(-self.length // self.batch)

    def place(self, number: int) -> tuple[int, int]:
        """The epoch of a batch, and its number in it, both counted from 0."""
        return divmod(number, self.batches)

    def __call__(self, number: int) -> Tensor:
        """The samples of a batch.

        Args:
            number: of the batch, counted from 0 through all epochs.

        Returns:
            int64, 1-D.
        """
        epoch, at = self.place(number)
        begin = at * self.batch
        places = torch.arange(begin, min(begin + self.batch, self.length), device="cpu")
        if not self.shuffle:
            return places
        if self.length <= SMALL:
            return _sorted(self.length, self.seed, epoch)[places]
        return _walked(places, self.length, _keys(self.seed, epoch))


@functools.lru_cache(maxsize=4)
def _sorted(length: int, seed: int, epoch: int) -> Tensor:
    """The samples of an epoch, sorted by hashes of their numbers."""
    return _hash(torch.arange(length, device="cpu"), _keys(seed, epoch)[0]).argsort(stable=True)


def _walked(places: Tensor, length: int, keys: list[int]) -> Tensor:
    """The samples at these places of an epoch.

    A Feistel cipher permutes the numbers below a power of four; whoever leaves the range of samples goes on from there
    until it is back (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """
    half = (max(2, (length - 1).bit_length()) + 1) // 2
    found = _cipher(places, half, keys)
    while (out := found >= length).any():
        found[out] = _cipher(found[out], half, keys)
    return found


def _cipher(numbers: Tensor, half: int, keys: list[int]) -> Tensor:
    """A permutation of the numbers of ``2 * half`` bits."""
    mask = (1 << half) - 1
    left, right = numbers >> half, numbers & mask
    for key in keys:
        left, right = right, left ^ (_hash(right, key) & mask)
    return (left << half) | right


def _hash(numbers: Tensor, key: int) -> Tensor:
    """Hashes of numbers: 40 bits that look random. Products wrap around."""
    mixed = (numbers + key) * ODD
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * LATER
    return (mixed >> 24) & 0xFFFFFFFFFF


def _keys(seed: int, epoch: int) -> list[int]:
    """The keys of an epoch: 62 bits each."""
    digest = hashlib.blake2b(f"fshard {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") >> 2 for i in range(ROUNDS)]
