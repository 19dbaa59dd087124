"""Buckets: batches of many lengths are padded to few, where each new length would be traced or compiled anew."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import described
from fshard.errors import BatchError, PlanError, lines
from fshard.runtime.engine.batch import Microbatches
from fshard.sharding.plan import Plan
from fshard.sharding.spec import axes_of


@dataclass(frozen=True)
class Buckets:
    """Sizes to which steps pad one dim of a batch, with values that the user gives for each tensor.

    A step traces its function once for all sizes. What depends on sizes are the graphs of units (``compile=``), and the
    programs of pipelines: with powers of two there are as many as the largest size has binary digits, at most.

    The loss must ignore what is filled: labels with the ``ignore_index`` of the loss, masks with 0. A step checks that:
    it runs its function with and without the padding, and compares losses and norms of gradients, in the first call in
    which any rank pads, and again with more padding, until a rank pads by an eighth. Operators that draw random numbers
    give constants in these two runs.

    Attributes:
        fill: by tensor the value to fill with, in the structure of the batch; None for what is left as it is.
        dim: the dim to pad at its end, 1 or more. Tensors may have different sizes along it; each has its own bucket.
        sizes: the sizes to pad to, increasing; empty for the powers of two.
        check: whether steps check that the padding changes nothing.

    Raises:
        PlanError: an invalid dim or sizes.

    >>> buckets = fs.Buckets({"tokens": 0, "labels": -100})
    >>> buckets.pad({"tokens": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[6, 7, 8]])})
    {'tokens': tensor([[5, 6, 7, 0]]), 'labels': tensor([[   6,    7,    8, -100]])}
    """

    fill: Any
    dim: int = 1
    sizes: tuple[int, ...] = ()
    check: bool = True

    def __post_init__(self) -> None:
        if type(self.dim) is not int or self.dim < 1:
            raise PlanError(
                f"fs.Buckets(dim={self.dim!r}): give a dim of 1 or more, counted from the first: dim 0 has the rows "
                f"of the batch, whose number the mean of a loss depends on"
            )
        sizes = self.sizes
        whole = isinstance(sizes, tuple) and all(type(size) is int and size > 0 for size in sizes)
        if not whole or any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
            raise PlanError(f"fs.Buckets(sizes={sizes!r}): give a tuple of increasing whole numbers, such as (64, 512)")
        wrong = [x for x in tree.leaves(self.fill) if not isinstance(x, (bool, int, float, type(None)))]
        if wrong or not isinstance(self.check, bool):
            told = f"fill= has {described(wrong[0])}" if wrong else f"check={self.check!r}"
            raise PlanError(f"fs.Buckets: {told}: fill= takes numbers, bools and None, check= True or False")

    def pad(self, batch: Any) -> Any:
        """The batch with its tensors padded to their buckets. Those that fill one are not copied.

        Args:
            batch: any pytree of tensors, or ``fs.Microbatches`` of such.

        Raises:
            BatchError: ``fill`` has another structure than the batch; a tensor lacks the dim, exceeds the largest size,
                or cannot hold the value.
        """
        if isinstance(batch, Microbatches):
            return Microbatches([self.pad(part) for part in batch.parts])
        leaves, structure = tree.flatten(batch)
        fills, given = tree.flatten(self.fill)
        if given != structure:
            fills = self._by_name(batch)
        return tree.unflatten(
            structure, [self._padded(batch, *pair) for pair in enumerate(zip(leaves, fills, strict=True))]
        )

    def largest(self, batch: Any) -> int:
        """The largest size of a tensor of a batch that is padded."""
        return max(self._sizes(batch), default=0)

    def added(self, batch: Any) -> float:
        """The largest share of its own size by which a tensor of a batch is padded."""
        return max([self._bucket(size) / size - 1 for size in self._sizes(batch) if size], default=0.0)

    def _sizes(self, batch: Any) -> list[int]:
        """The sizes of the tensors that are padded."""
        if isinstance(batch, Microbatches):
            return [size for part in batch.parts for size in self._sizes(part)]
        fills = self._by_name(batch)
        return [x.shape[self.dim] for x, fill in zip(tree.leaves(batch), fills, strict=True) if fill is not None]

    def _by_name(self, batch: Any) -> list[Any]:
        """The value for each leaf of a batch whose containers may be of other classes."""
        names, known = (
            tree.names(batch, "batch"),
            dict(zip(tree.names(self.fill, "batch"), tree.leaves(self.fill), strict=True)),
        )
        lacking = [f"{name}: no value for it" for name in names if name not in known]
        odd = [f"{name}: the batch has no such leaf" for name in known if name not in names]
        if lacking or odd:
            remedy = "Give a value for each tensor, which the loss ignores, and None for what is left as it is."
            raise BatchError(lines("fs.Buckets(fill=) has another structure than the batch:", [*lacking, *odd], remedy))
        return [known[name] for name in names]

    def _bucket(self, size: int) -> int:
        """The smallest bucket that holds a size; the size itself if none does."""
        if not self.sizes:
            return 1 << (size - 1).bit_length() if size else 0
        return next((one for one in self.sizes if one >= size), size)

    def _padded(self, batch: Any, number: int, pair: tuple[Any, Any]) -> Any:
        """A leaf, padded."""
        x, fill = pair
        if fill is None:
            return x
        if not isinstance(x, Tensor) or x.ndim <= self.dim:
            told = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is {described(x)}"
            raise self._refusal(batch, number, f"{told}, and no dim {self.dim} to pad: give None for it in fill=")
        size = x.shape[self.dim]
        if self.sizes and size > self.sizes[-1]:
            raise self._refusal(
                batch, number, f"has {size} along dim {self.dim}, more than the largest of sizes={self.sizes}: add one"
            )
        if (bucket := self._bucket(size)) == size:
            return x
        try:
            rest = x.new_full((*x.shape[: self.dim], bucket - size, *x.shape[self.dim + 1 :]), fill)
        except RuntimeError:
            rest = None
        if rest is None or (x.dtype.is_floating_point is False and isinstance(fill, float)):
            raise self._refusal(batch, number, f"is of {x.dtype}, which cannot hold fill={fill!r}")
        return torch.cat((x, rest), self.dim)

    def _refusal(self, batch: Any, number: int, told: str) -> BatchError:
        return BatchError(f"fs.Buckets: {tree.names(batch, 'batch')[number]} {told}")


def bucket_problems(buckets: Any, plan: Plan, in_backward: bool = False) -> list[str]:
    """Say why steps of a plan cannot pad to these buckets."""
    if buckets is None:
        return []
    if not isinstance(buckets, Buckets):
        return [f"buckets={buckets!r} must be fs.Buckets(fill) or None"]
    found = []
    axes = axes_of(plan.batch.dims[buckets.dim]) if buckets.dim < len(plan.batch.dims) else ()
    if plan.mesh.axis_size(axes) > 1:
        found.append(
            f"buckets= pads dim {buckets.dim} of each rank's batch, and batch={plan.batch!r} cuts it over "
            f"{'+'.join(axes)}, so that padding would lie between tokens: pad the global batch, "
            f"plan.local_batch(buckets.pad(batch))"
        )
    if in_backward and buckets.check:
        found.append(
            "buckets= checks the gradient of the first padded batches before it updates, and update='in_backward' has "
            "updated by then: give fs.Buckets(check=False) once the padding is known to change nothing"
        )
    return found
