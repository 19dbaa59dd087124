"""Refusals of steps: one message builder per failure, as in ``fshard.errors``."""

from collections.abc import Mapping, Sequence

from fshard.errors import LossError, TransformError, lines
from fshard.runtime.comm.facts import differences


def weighted_in_backward() -> LossError:
    """A loss that is an ``fs.Mean``, with updates before its global count is known."""
    return LossError(
        "the loss is an fs.Mean, but update='in_backward' updates before the count over all ranks and microbatches is "
        "known: use update='deferred', or return a plain mean"
    )


def different_microbatches() -> LossError:
    """The loss function returned different types for microbatches of one step."""
    return LossError(
        "the loss function returned different types for two microbatches of one step: return an fs.Mean for all or for "
        "none of them, and auxiliary values with the same keys"
    )


def unlike_losses(kinds: Sequence[tuple[bool, int, int]]) -> LossError:
    """The function returned different types on different ranks."""
    rows = [f"rank {rank}: {kind_text(*kind)}" for rank, kind in enumerate(kinds)]
    remedy = "Return the same types and names on every rank. Nothing was updated, and the state can be used again."
    return LossError(lines("the function returned different types on different ranks:", rows, remedy))


def kind_text(weighted: bool, means: int, names: int) -> str:
    """The kind of what a loss function returned: whether its loss is an ``fs.Mean``, and its auxiliary means."""
    loss, named = "an fs.Mean" if weighted else "a tensor", f", whose names hash to {names:08x}" if means else ""
    return f"{loss} as the loss, and {means} other numbers to average{named}"


def negative_counts(counts: Sequence[float]) -> LossError:
    """Ranks have counts below zero, -inf, of an ``fs.Mean``."""
    rows = [f"rank {rank}: below zero in a microbatch" for rank, count in enumerate(counts) if count < 0]
    return LossError(
        lines(
            "the count of an fs.Mean is negative, so that its mean would be divided by too little:",
            rows,
            "Count elements, such as mask.sum(). Nothing was updated, and the state can be used again.",
        )
    )


def unlike_values(told: Sequence[Mapping[str, str]]) -> LossError:
    """The function returned plain values that differ between ranks, and have no mean."""
    remedy = (
        "Numbers that may differ are floats, of which all ranks get the mean: give fs.Mean(total, count), or "
        "float(n). fs.collectives.psum makes a sum. A value of each rank is a tensor with a dim, such as n[None]."
    )
    return LossError(lines("the function returned values that must be equal on all ranks:", differences(told), remedy))


def unlike_skips(said: Sequence[int]) -> LossError:
    """``skip=`` returned different decisions on different ranks."""
    rows = [f"rank {rank}: {'skip' if skip else 'make'} the step" for rank, skip in enumerate(said)]
    remedy = "Decide by metrics.loss, metrics.grad_norm or an fs.Mean in aux, which are equal on all ranks."
    return LossError(lines("skip= returned different decisions for one step:", rows, remedy))


def step_transformed(what: str) -> TransformError:
    """A step was called inside of a transform."""
    return TransformError(
        f"{what} was called inside of a transform of torch.func, which cannot follow it, because it reuses the memory "
        f"of its state. Transform fs.func.sharded_loss(loss_fn, plan) or fs.value_and_grad(loss_fn, plan) "
        f"instead, and update with fs.func.differentiable(opt, plan)"
    )
