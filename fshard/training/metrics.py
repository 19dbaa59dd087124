"""Metrics of a step, and the report of what it took on one rank: its time, its arithmetic, its waits."""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.runtime.engine.loss_result import Mean, no_aux
from fshard.runtime.engine.plain_values import is_float, mean_of
from fshard.runtime.steps import scalar, widened
from fshard.runtime.steps.protocol import TRANSFERS, WAITS, waited
from fshard.runtime.steps.readings import read
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.tracking.tracker import scalars


@dataclass(frozen=True)
class RunReport:
    """A report on a step on this rank.

    Attributes:
        seconds: from the call of the step to its last exchange.
        flops: floating-point operations of the model on this rank, as a trace counts them: forward and backward of all
            microbatches, without what ``remat=`` computes again. None where no trace has counted: the program depends
            on values of tensors, or the batch has other shapes than the one that was traced.
        device: where it computed.
        schedule: its schedule; None if it ran on demand.
        record: the ops that it ran.
        times: when each of them began, and when the last one was over.
        busy: by rank, the seconds since the end of the step before in which it did not wait for others; empty on one
            rank. The rank with the most is the one that others wait for.
        graph: with ``Policy(graph=)`` how it ran: "replayed", "captured", or "eager" and the reason.
    """

    seconds: float = 0.0
    flops: int | None = None
    device: torch.device = field(default=torch.device("cpu"), repr=False)
    schedule: Schedule | None = field(default=None, repr=False)
    record: Sequence[Op] = field(default=(), repr=False)
    times: Sequence[float] = field(default=(), repr=False)
    busy: Sequence[float] = field(default=(), repr=False)
    graph: str = ""

    @property
    def slowest(self) -> int | None:
        """The rank that was busy longest; None on one rank."""
        return self.busy.index(max(self.busy)) if self.busy else None

    @functools.cached_property
    def exposed(self) -> float | None:
        """Seconds in which the step waited for other ranks: for transfers, sums of what has arrived included, and where
        ranks meet, at its begin and its end.

        None where they are not known: the step ran on demand or left its schedule, or runs on a device that the host
        runs ahead of.
        """
        ops = self.record
        if self.device.type != "cpu" or self.schedule is None or len(self.times) != len(ops) + 1:
            return None
        return waited(ops, self.times, WAITS if self.busy else TRANSFERS)


@dataclass(frozen=True)
class Metrics:
    """Metrics of a train step. Tensors are 0-dim, float32 or wider, equal on all ranks.

    Attributes:
        loss: the mean over the global batch, before the update; float64 where the loss is.
        grad_norm: the norm of the gradient over all leaves, before clipping; float64 where a trained leaf is.
        aux: the auxiliary values of the loss function. ``fs.Mean`` leaves are global means, and so are plain floats:
            Python's, and 0-dim floating tensors. Whole numbers, strings and None are equal on all ranks, or the step is
            refused. Other leaves are this rank's own. All but means are stacked along a new first dim if the step has
            several microbatches (a list if their shapes differ).
        skipped: whether the step was skipped, by ``skip_norm=``, ``skip=``, or because its gradient was not finite at
            this loss scale: parameters and optimizer state are unchanged.
        stop: whether any rank asked to stop: ``step(state, batch, stop=True)``.
        lr: the learning rate of the update; of several optimizers that of the first.
        grad_norms: norms before clipping, 0-dim, by name: of the leaves of each rule of ``clip_norm=[...]``, and of
            what ``make_train_step(..., norms=)`` asks for.
        elements: the elements of the global batch, such as its tokens, if the loss is an ``fs.Mean``; else 0.
        ran: how the step ran on this rank.

    >>> plan = fs.make_plan({"w": torch.ones(2)}, fs.make_mesh((1,), ("data",)), [(".*", fs.fsdp("data"))])
    >>> opt = fs.optim.sgd(0.5)
    >>> state = fs.init_state(plan, opt, params={"w": torch.ones(2)})
    >>> step = fs.make_train_step(lambda params, x: (params["w"] * x).sum(), opt, plan)
    >>> _, metrics = step(state, torch.tensor([3.0, 4.0]))
    >>> metrics.loss, metrics.grad_norm, metrics.lr, metrics.scalars()["loss"]
    (tensor(7.), tensor(5.), 0.5, 7.0)
    """

    loss: Tensor
    grad_norm: Tensor
    aux: Mapping[str, Any] = field(default_factory=dict)
    skipped: bool = False
    stop: bool = False
    lr: float = math.nan
    grad_norms: Mapping[str, Tensor] = field(default_factory=dict)
    elements: float = 0.0
    ran: RunReport = RunReport()

    def __getitem__(self, name: str) -> Any:
        """Refuse, with the way to what was meant."""
        raise TypeError(f"metrics are read as metrics.loss, or metrics.scalars()[{name!r}] as a number")

    def rate(self, elements: float | None = None) -> float | None:
        """Elements of the global batch, such as tokens, a second of this step; None where their number is not known.

        Args:
            elements: their number, for a loss that is no ``fs.Mean``.
        """
        elements = self.elements if elements is None else elements
        return elements / self.ran.seconds if elements and self.ran.seconds else None

    def mfu(self, peak: float) -> float | None:
        """The model FLOPs utilization (PaLM, Chowdhery et al. 2022): the part of the device's peak that the model used.

        None where ``ran.flops`` is. What ``remat=`` computes again does not count.

        Args:
            peak: what one device can do in a second; see ``fs.sim.measured_peak``.
        """
        return None if self.ran.flops is None or not self.ran.seconds else self.ran.flops / self.ran.seconds / peak

    def scalars(self) -> dict[str, float]:
        """All numbers as plain Python numbers by name, for ``json.dumps``: what trackers get.

        Names are ``loss``, ``grad_norm``, ``lr``, ``skipped``, ``aux/...``, ``grad_norms/...``, ``seconds``, and where
        they are known ``elements``, ``elements_per_second``, ``exposed`` and ``flops``. On several ranks there are
        ``busy_max``, ``busy_min`` and ``busy_max_rank``: the most and the fewest seconds that a rank took from the end
        of the step before without waiting for others, and the rank that took the most. Of ``aux`` it has the values
        that are numbers.

        >>> metrics = fs.types.Metrics(torch.tensor(0.5), torch.tensor(2.0), {"accuracy": torch.tensor(0.75)}, lr=0.1)
        >>> metrics.scalars()
        {'loss': 0.5, 'grad_norm': 2.0, 'lr': 0.1, 'skipped': False, 'aux/accuracy': 0.75, 'seconds': 0.0}
        """
        found: dict[str, Any] = {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr, "skipped": self.skipped}
        found |= {"aux": self.aux, "grad_norms": self.grad_norms, "seconds": self.ran.seconds}
        if (busy := self.ran.busy) and max(busy):
            found |= {"busy_max": max(busy), "busy_min": min(busy), "busy_max_rank": self.ran.slowest}
        if self.elements:
            found |= {"elements": self.elements, "elements_per_second": self.rate()}
        told = {"exposed": self.ran.exposed, "flops": self.ran.flops}
        return scalars(found | {name: value for name, value in told.items() if value is not None})


def combine_aux(parts: Sequence[Any], means: Sequence[float], floats: Sequence[float] | None = None) -> Any:
    """The auxiliary values of all microbatches.

    Args:
        parts: those of each.
        means: the global mean of each ``fs.Mean``.
        floats: the global mean of each plain float; without, its mean over the microbatches.
    """
    if not parts or no_aux(parts[0]) or not tree.leaves(parts[0]):
        return parts[0] if parts else {}
    found, plain = iter(means), None if floats is None else iter(floats)
    flat = [tree.flatten(part) for part in parts]
    columns = zip(*[leaves for leaves, _ in flat], strict=True)
    return tree.unflatten(flat[0][1], [_combine(column, found, plain) for column in columns])


def global_result(result: Any, means: Sequence[float], floats: Sequence[float]) -> Any:
    """An evaluation's result: plain floats and ``fs.Mean`` as global means, others as they are."""
    return combine_aux([result], means, floats)


def _combine(column: Sequence[Any], means: Iterator[float], floats: Iterator[float] | None) -> Any:
    if isinstance(column[0], Mean):
        return scalar(next(means), widened([column[0].total.dtype]))
    if all(map(is_float, column)):
        return like_float(column[0], mean_of([*read(column)]) if floats is None else next(floats))
    column = [x.detach() if isinstance(x, Tensor) else x for x in column]
    if len(column) == 1:
        return column[0]
    alike = len({x.shape if isinstance(x, Tensor) else None for x in column}) == 1
    return torch.stack(column) if alike and isinstance(column[0], Tensor) else column


def like_float(value: Any, mean: float) -> Any:
    """A mean of plain floats, as one of them: a Python float, or a 0-dim tensor of float32 or wider."""
    return scalar(mean, widened([value.dtype])) if isinstance(value, Tensor) else mean
