"""Padded batches of steps, and the comparison of what a step makes of a batch with and without its padding."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import BatchError
from fshard.runtime.comm import exchange
from fshard.runtime.comm.facts import Facts
from fshard.runtime.engine.buckets import Buckets
from fshard.runtime.steps import Runner
from fshard.runtime.steps.handshake import Terms, agree
from fshard.runtime.steps.rank_end import decline
from fshard.sharding.plan import Plan
from fshard.torch_internals import TorchDispatchMode

ENOUGH = 1 / 8
"""A batch that grows by this share shows whether padding changes anything, and no other is compared."""

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The largest relative difference of what sums of other lengths round otherwise; 0.05 for short dtypes."""

Tried = Callable[[Any], Sequence[float]]
"""Runs a step on a batch, without any effect, and returns numbers that padding must not change, equal on all ranks."""


class PaddingCheck:
    """Pads the batches of one step.

    The ranks of a pipeline's copies need one size, so batches are padded to the largest of all ranks there.

    Args:
        buckets: to which sizes.
        runner: of the step.
    """

    def __init__(self, buckets: Buckets, runner: Runner) -> None:
        self.buckets, self.programs, self.call = buckets, runner.programs, runner.call
        plan = runner.plan.whole or runner.plan
        self.joint, self.tolerance = plan.stages is not None, tolerance_of(plan)
        self._shown = 0.0 if buckets.check else math.inf  # the largest share of padding that changed nothing

    def padded(self, batch: Any, tried: Tried, facts: Callable[[], Facts]) -> Any:
        """The batch in its buckets. Collective until a batch with enough padding was compared, and in pipelines.

        Raises:
            BatchError: the batch cannot be padded, or its padding changes a number; on all ranks alike.
        """
        buckets, control = self.buckets, self.programs.comms.control
        try:
            made = buckets.pad(batch)
            if self._shown >= ENOUGH and not self.joint:
                return made
            terms = Terms(self.call, batch=batch, facts=facts() if control.size > 1 else Facts())
            mine = torch.tensor([buckets.largest(batch), int(1e6 * buckets.added(batch))], device="cpu")
        except BaseException as error:
            decline(control, self.call, batch, error)
        agree(control, terms)
        size, share = exchange(control, mine).amax(0).tolist()
        if self.joint and size:
            batch = replace(buckets, sizes=(size,)).pad(batch)
            made, share = buckets.pad(batch), int(1e6 * buckets.added(batch))
        if self._shown < ENOUGH and share > 1e6 * self._shown:
            with self._unreported():
                plain, long = tried(batch), tried(made)
            self._compare(plain, long)
            self._shown = share / 1e6 if all(map(math.isfinite, plain)) else self._shown
        return made

    @contextmanager
    def _unreported(self) -> Iterator[None]:
        """Leave the report on graphs of units as it was: these runs use none."""
        cache = self.programs.cache
        kept = {} if cache is None else {unit: dict(runs) for unit, runs in cache.report.items()}
        try:
            yield
        finally:
            if cache is not None:
                cache.report.clear()
                cache.report.update(kept)

    def _compare(self, plain: Sequence[float], long: Sequence[float]) -> None:
        pairs = list(zip(plain, long, strict=True))
        apart = [
            (a, b) for a, b in pairs if math.isfinite(a) and not abs(a - b) <= self.tolerance * max(abs(a), abs(b))
        ]
        if apart:
            told = ", ".join(f"{a:.6g} without padding and {b:.6g} with it" for a, b in apart)
            raise BatchError(
                f"{self.call}(buckets=): padding along dim {self.buckets.dim} with fill={self.buckets.fill!r} changes "
                f"what the function computes: {told}. Fill what the loss ignores: labels with its ignore_index, masks "
                f"of attention and of losses with 0; and let it divide by the number of labels that count, "
                f"fs.Mean(total, count). fs.Buckets(check=False) takes the difference. Nothing was updated, and the "
                f"state can be used."
            )


def tolerance_of(plan: Plan) -> float:
    """The largest relative difference between sums of other lengths, by what the plan computes in."""
    short = any(group.wires for group in plan.groups) or any(leaf.products for leaf in plan.leaves.values())
    dtypes = {dtype for group in plan.groups for dtype in (group.compute_dtype, group.reduce_dtype)}
    return 0.05 if short else max([TOLERANCES.get(dtype, 0.05) for dtype in dtypes], default=1e-4)


def numbers_of(result: Any) -> list[float]:
    """The numbers of what an evaluation has returned: those that are equal on all ranks."""
    return [float(x) for x in tree.leaves(result) if type(x) is float or (isinstance(x, Tensor) and not x.ndim)]


@contextmanager
def without_draws(randomness: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, operators that draw random numbers return constants, so that results depend on no size.

    Args:
        randomness: the context in which a program draws.
    """
    with randomness(), _Constants():  # type: ignore[no-untyped-call]
        yield


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Drop nothing, and fill what would be drawn with 1/2."""
        kwargs = kwargs or {}
        names = [argument.name for argument in func._schema.arguments] if hasattr(func, "_schema") else []
        if "dropout_p" in names:
            place = names.index("dropout_p")
            if place < len(args):
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in kwargs:
                kwargs = {**kwargs, "dropout_p": 0.0}
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        found = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            for x in tree.leaves(found):
                if isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype is torch.bool):
                    x.fill_(0.5)
        return found
