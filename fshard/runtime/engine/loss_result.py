"""The results that a loss function may return: a scalar, an ``fs.Mean``, or either with a dict of auxiliary values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import LossError
from fshard.model.changed_buffers import detached_own, is_own
from fshard.runtime.engine.mean import Mean as Mean
from fshard.torch_internals import FakeTensor


@dataclass(frozen=True)
class Loss:
    """A loss read off a loss function's result. ``count`` is None for a plain scalar."""

    total: Tensor
    count: Tensor | float | None
    aux: Any


def read_loss(result: Any) -> Loss:
    """Take the result of a loss function apart.

    Raises:
        LossError: it holds no 0-dim floating tensor that depends on the parameters, aux is not a dict, or the count of
            an ``fs.Mean`` requires grad.
    """
    head: Any = result
    aux: Mapping[str, Any] = {}
    if isinstance(result, tuple):
        if len(result) != 2 or not isinstance(result[1], Mapping):
            kinds = ", ".join("Tensor" if isinstance(part, Tensor) else type(part).__name__ for part in result)
            raise LossError(f"the loss function returned a tuple of ({kinds}): return a loss, or (loss, aux dict)")
        head, aux = result
    total = head.total if isinstance(head, Mean) else head
    if not isinstance(total, Tensor):
        raise LossError(f"the loss is {_instead(head, total)}: return a scalar tensor or fs.Mean")
    if total.ndim or not total.dtype.is_floating_point:
        name = str(total.dtype).removeprefix("torch.")
        raise LossError(
            f"the loss has shape {list(total.shape)} and dtype {name}: reduce it to one floating-point number, "
            f"with .mean(), or fs.Mean(losses.sum(), losses.numel()) where counts differ between ranks"
        )
    means = [*means_of(head), *means_of(aux)] if aux or isinstance(head, Mean) else []
    _check_means(means)
    return Loss(total, _count(head), aux)


def _check_means(means: Sequence[Mean]) -> None:
    """Refuse means whose parts are no scalars, and counts below zero, as far as the host knows these."""
    bad = [mean for mean in means if not _scalar_parts(mean)]
    if bad:
        raise LossError(
            f"fs.Mean takes a 0-dim floating tensor and a 0-dim count: got {_shaped(bad[0].total)} and "
            f"{_shaped(bad[0].count)} as the count"
        )
    negative = [mean.count for mean in means if not isinstance(mean.count, Tensor) and mean.count < 0]
    if negative:
        raise LossError(f"fs.Mean has a count of {negative[0]}: count elements, such as mask.sum(), so 0 or more")


def _count(head: Any) -> Tensor | float | None:
    """The count of a loss; None of a plain scalar."""
    count: Tensor | float | None = head.count if isinstance(head, Mean) else None
    if isinstance(count, Tensor) and count.requires_grad:
        raise LossError(
            "the count of the fs.Mean that is the loss requires grad, and gradients of counts are not taken: give "
            "count.detach(), or, to differentiate through it, return total / count, the mean of this rank"
        )
    return count


def _shaped(value: Any) -> str:
    """Return what a part of an ``fs.Mean`` is, and its shape."""
    shape = f" of shape {list(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"


def _instead(head: Any, total: Any) -> str:
    """Return what was returned in the place of a loss, and where it may come from."""
    name = type(total).__name__
    if isinstance(head, Mean):
        return f"{name}, not a tensor, in fs.Mean(total, count), whose total comes first"
    hints = {
        "NoneType": ". A function without return gives None; so does .backward(), which the step calls",
        "float": ". Leave out .item() and float()",
        "dict": ". Values to look at go beside it, (loss, aux)",
        "list": ". The mean of several losses is one, sum(losses) / len(losses)",
    }
    return f"{name}, not a tensor{hints.get(name, '')}"


def check_differentiable(loss: Loss) -> None:
    """Refuse a loss that no parameter can get a gradient from.

    Raises:
        LossError: it does not require grad.
    """
    if not loss.total.requires_grad:
        raise LossError(
            "the loss does not depend on any trainable parameter: it must be computed from params, "
            "outside of torch.no_grad() and without .detach()"
        )


def check_data(result: Any) -> None:
    """Refuse what a real run of a function has made of tensors without data.

    Raises:
        LossError: its trace, a run on such tensors, has left some where the function keeps values between calls.
    """
    found = [x.total if isinstance(x, Mean) else x for x in tree.leaves(result)]
    if FakeTensor in set(map(type, found)):
        raise left_by_trace()


def left_by_trace() -> LossError:
    """The error of a function that reads what its trace has left where it keeps values between calls."""
    return LossError(
        "the function keeps tensors from one call to the next, in an object or a closure, such as a running mean or a "
        "hidden state, and reads what its trace, a run on tensors without data, has left there. Pass what lives from "
        "step to step in with the batch, and return it in the aux dict"
    )


def detached(value: Any) -> Any:
    """A leaf of auxiliary values without its graph."""
    if isinstance(value, Mean):
        return Mean(value.total.detach(), detached(value.count))
    return detached_own(value) if isinstance(value, Tensor) else value


def no_aux(aux: Any) -> bool:
    """Tell whether auxiliary values are the empty dict of a function that returned a loss alone."""
    return isinstance(aux, dict) and not aux


def means_of(aux: Any) -> list[Mean]:
    """The ``Mean`` leaves of auxiliary values, in order."""
    return [leaf for leaf in tree.leaves(aux) if isinstance(leaf, Mean)]


def fingerprint(aux: Any) -> tuple[int, int]:
    """Return how many ``Mean`` leaves auxiliary values have, and a hash of their names."""
    leaves = tree.leaves(aux)
    if not any(isinstance(leaf, Mean) for leaf in leaves):
        return 0, 0
    named = [name for name, leaf in zip(tree.names(aux, ""), leaves, strict=True) if isinstance(leaf, Mean)]
    return len(named), crc32("\n".join(named).encode())


def as_means(result: Any) -> Any:
    """A result in which 0-dim floating leaves are means over ranks, too, unless they are a rank's own."""
    return tree.mapped(lambda x: Mean(x, 1.0) if is_scalar(x) and not is_own(x) else x, result)


def check_means(result: Any) -> None:
    """Refuse the result of an evaluation whose ``fs.Mean`` are no single numbers.

    Raises:
        LossError: naming the shapes.
    """
    for mean in means_of(result):
        shapes = [
            list(part.shape) for part in (mean.total, mean.count) if isinstance(part, Tensor) and part.numel() != 1
        ]
        if shapes:
            raise LossError(
                f"fs.Mean takes a total and a count of one element each, and was given shapes {shapes}: sum over all "
                f"elements first"
            )


def _scalar_parts(mean: Mean) -> bool:
    count = mean.count
    return is_scalar(mean.total) and (count.ndim == 0 if isinstance(count, Tensor) else isinstance(count, int | float))


def is_scalar(value: Any) -> bool:
    """Tell whether a value is a 0-dim floating tensor."""
    return isinstance(value, Tensor) and value.ndim == 0 and value.dtype.is_floating_point


def number(value: Tensor | float | None) -> float:
    """A number as a Python float; None counts as zero. Reads the device."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value or 0.0)


def foreign_loss() -> LossError:
    """A loss of other tensors: most often of a module that was called itself."""
    return LossError(
        "the loss depends on tensors that require grad, but on none of the step's parameters: compute it from params, "
        "with model.apply(params, ...), not by calling the module that was split"
    )
