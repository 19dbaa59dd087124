"""``fs.Mean``: a mean given as its parts, and arithmetic on it that stays exact over ranks and microbatches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fshard.arguments import kind
from fshard.errors import LossError
from fshard.hints import hinting


@dataclass(frozen=True)
class Mean:
    """A mean given as its parts, so that it stays exact over ranks and microbatches of unequal counts.

    It can be multiplied and divided by a number, and added to a mean with the same count. ``Mean.sum`` adds means with
    counts of their own.

    Args:
        total: the sum over this rank's elements, 0-dim floating.
        count: the number of elements, 0-dim tensor or number; that of a loss must not require grad.

    >>> losses = torch.tensor([1.0, 3.0, 5.0])
    >>> fs.Mean(losses.sum(), losses.numel()).value
    tensor(3.)
    """

    __tree_leaf__: ClassVar[bool] = True
    total: Tensor
    count: Tensor | float

    @property
    def value(self) -> Tensor:
        """This rank's own mean."""
        return self.total / self.count

    @staticmethod
    def sum(*means: "Mean", counts: Tensor) -> "Mean":
        """The sum of means with counts of their own, such as a loss of tokens and one of images, as one mean.

        It is exact over ranks of unequal counts and under ``accumulate=``, as each total is divided by the count of all
        ranks and microbatches. The loss function of a microbatch cannot know that, so the batch brings it: one
        ``fs.collectives.psum(counts, "data", mesh=mesh)`` before the step, in ``fs.Whole``.

        Args:
            means: two or more.
            counts: how many elements each of them has on all ranks and microbatches, 1-D, in their order. A mean
                without any is zero.

        Returns:
            A mean whose counts add to one over all ranks and microbatches.

        Raises:
            LossError: an argument is no mean, or ``counts`` does not have one number for each.

        >>> text, image = fs.Mean(torch.tensor(6.0), 3), fs.Mean(torch.tensor(10.0), 2)
        >>> fs.Mean.sum(text, image, counts=torch.tensor([3, 2])).value  # on one rank
        tensor(7.)
        """
        odd = [kind(mean) for mean in means if not isinstance(mean, Mean)]
        if odd or not means or not isinstance(counts, Tensor) or counts.shape != (len(means),):
            given = f"{list(counts.shape)}" if isinstance(counts, Tensor) else kind(counts)
            what = f"was given {odd[0]} among its means" if odd else f"has {len(means)} means and counts of {given}"
            raise LossError(f"fs.Mean.sum {what}: give several fs.Mean, and counts=, a tensor with one number for each")
        whole = counts.detach().to(torch.promote_types(means[0].total.dtype, torch.float32))
        divisors = torch.where(whole > 0, whole, 1.0)
        shares = [mean.count / divisor for mean, divisor in zip(means, divisors, strict=True)]
        total: Any = sum(mean.total / divisor for mean, divisor in zip(means, divisors, strict=True))
        return Mean(total, torch.stack([*map(torch.as_tensor, shares)]).sum() / (whole > 0).sum())

    def __mul__(self, factor: Any) -> "Mean":
        return Mean(self.total * _factor(factor, "*"), self.count)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Mean":
        return Mean(self.total / _factor(divisor, "/"), self.count)

    def __neg__(self) -> "Mean":
        return Mean(-self.total, self.count)

    def __add__(self, other: Any) -> "Mean":
        if isinstance(other, Mean):
            tensors = isinstance(self.count, Tensor) or isinstance(other.count, Tensor)
            if self.count is other.count or not tensors and self.count == other.count:
                return Mean(self.total + other.total, self.count)
            raise LossError(
                "fs.Mean + fs.Mean is exact only where both have one count, the same object: for means with counts of "
                "their own, fs.Mean.sum(a, b, counts=), with their counts on all ranks from the batch"
            )
        if isinstance(other, int | float) and other == 0:  # where ``sum`` begins
            return self
        raise LossError(
            f"fs.Mean + {kind(other)}: a mean of unknown weight. A term of the parameters alone, or a number, is the "
            f"same for every element: fs.Mean(mean.total + term * mean.count, mean.count). A mean over elements of "
            f"their own is an fs.Mean, too: fs.Mean.sum(a, b, counts=)"
        )

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Mean":
        return self.__add__(-other)

    def __rsub__(self, other: Any) -> "Mean":
        return (-self).__add__(other)

    if not TYPE_CHECKING:
        __getattr__ = hinting(
            {
                "backward item": "it is what a loss function returns: the step calls backward, and metrics.loss.item() "
                "is the number; mean.value is this rank's own mean"
            }
        )


def _factor(value: Any, sign: str) -> Any:
    """Return a factor of a mean.

    Raises:
        LossError: the value is no number.
    """
    if isinstance(value, int | float) or isinstance(value, Tensor) and value.ndim == 0:
        return value
    raise LossError(f"fs.Mean {sign} {kind(value)}: give a number or a 0-dim tensor that is equal on all ranks")
