"""Scores of a model over a data set: perplexity, exact over ranks, batches and unequal numbers of tokens."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from fshard.arguments import Want, described, expect
from fshard.errors import BatchError, LossError
from fshard.runtime.comm import collective_call, telling
from fshard.runtime.engine import Mean
from fshard.state.train_state import TrainState
from fshard.training.buffer_sync import Whole
from fshard.training.evaluate import make_eval_step


class Perplexity(NamedTuple):
    """Of a data set.

    Attributes:
        perplexity: the exponential of the loss.
        loss: the mean over all elements of all ranks.
        batches: the most batches that a rank had.

    >>> fs.generation.Perplexity(perplexity=4.0, loss=1.3863, batches=2).perplexity
    4.0
    """

    perplexity: float
    loss: float
    batches: int


@collective_call
def perplexity(
    state: TrainState, loss_fn: Callable[[Any, Any], Any], batches: Iterable[Any], **options: Any
) -> Perplexity:
    """The perplexity of a model over a data set. Collective.

    The mean is that of all elements of all batches and ranks, however many there are in each. Ranks may have unequal
    numbers of batches: those that have no more go along with the last one, without counting it.

    Args:
        state: the state.
        loss_fn: ``loss_fn(params, batch)``, which returns an ``fs.Mean``: the sum of the negative log-likelihoods, and
            how many they are.
        batches: this rank's batches, at least one.
        **options: as for ``fs.make_eval_step``.

    Raises:
        LossError: the function returned something else than an ``fs.Mean``.
        BatchError: this rank has no batch.

    >>> plan = fs.make_plan({"odds": torch.zeros(4)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> def loss_fn(params, x):
    ...     return fs.Mean(-params["odds"].log_softmax(0)[x].sum(), x.numel())
    >>> state = fs.init_state(plan, params={"odds": torch.zeros(4)})
    >>> round(fs.perplexity(state, loss_fn, [torch.tensor([0, 1, 2]), torch.tensor([3])]).perplexity, 4)
    4.0
    """
    wants: list[Want] = [
        ("state", state, TrainState, "what a step returned"),
        ("loss_fn", loss_fn, Callable, "a function of (params, batch)"),
        ("batches", batches, Iterable, "batches of this rank"),
    ]
    expect("perplexity(state, loss_fn, batches)", wants)

    def sums(params: Any, given: tuple[Any, Whole]) -> dict[str, Mean]:
        batch, weights = given[0], given[1].value
        mean = loss_fn(params, batch)
        if not isinstance(mean, Mean):
            raise LossError(f"perplexity: the loss is {described(mean)}: return fs.Mean(losses.sum(), losses.numel())")
        # Means over ranks of sums, whose ratio is that of the sums.
        return {
            "total": Mean(mean.total.double() * weights[0], 1),
            "count": Mean(weights[0] * mean.count, 1),
            "more": Mean(weights[1], 1),
        }

    with telling(state.plan.mesh.here):
        return _walked(make_eval_step(sums, state.plan, **options), state, iter(batches))


def _walked(step: Any, state: TrainState, batches: Any) -> Perplexity:
    """The batches of all ranks, in step."""
    end = object()
    batch, following = next(batches, end), next(batches, end)
    if batch is end:
        raise BatchError("perplexity: this rank has no batch: give each rank one at least")
    total = count = 0.0
    made, weight = 0, 1.0
    while True:
        device = state.plan.mesh.device
        weights = torch.tensor([weight, float(following is not end)], dtype=torch.float64, device=device)
        found = step(state, (batch, Whole(weights)))
        total, count, made = total + found["total"].item(), count + found["count"].item(), made + 1
        if not found["more"]:
            break
        if following is end:
            weight = 0.0
        else:
            batch, following = following, next(batches, end)
    loss = total / count if count else math.nan
    return Perplexity(math.exp(loss) if loss < 700 else math.inf, loss, made)
