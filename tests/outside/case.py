"""A program that nobody here wrote, or that is written as others write them, with its loss and its batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, VOCAB = 8, 8, 61
Batch = dict[str, Any]


def itself(out: Any) -> Tensor:
    """A model that returns its loss, or an output that holds it."""
    loss = out if isinstance(out, Tensor) else out.loss
    assert isinstance(loss, Tensor)
    return loss


@dataclass(frozen=True)
class Outside:
    """One model.

    Attributes:
        named: what it is: a class of ``transformers`` or of ``images``, ``sequences`` and ``fields``.
        make: the module, from numbers of torch's generator.
        batch: what it is called with at a step, for all ranks together.
        units: as for ``fs.split``.
        parts: whether rows of the batch see each other: then one process, too, works on each rank's part by itself.
        buffers: whether the call changes buffers; they go with the batch then, and come back averaged.
        loss: of what the model returns.
        given: a batch as the module takes it.
        extra: arguments of every call, alike for all rows.
    """

    named: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    units: Any = "auto"
    parts: bool = False
    buffers: bool = False
    loss: Callable[[Any], Tensor] = itself
    given: Callable[[Batch], Batch] = lambda batch: batch
    extra: dict[str, Any] = field(default_factory=dict)

    def objective(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        """The loss of a part of a batch."""
        return self.loss(forward(**self.given(batch), **self.extra))

    def build(self) -> nn.Module:
        """The module in training mode; with the same values in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return self.make().train()

    def at(self, step: int) -> Batch:
        """The global batch of a step."""
        return self.batch(torch.Generator().manual_seed(100 + step))


def words(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    """Ids of words."""
    return torch.randint(3, VOCAB, (ROWS, length), generator=generator)


def labels(generator: torch.Generator, count: int) -> Batch:
    """A class for each row."""
    return {"labels": torch.randint(count, (ROWS,), generator=generator)}


def images(generator: torch.Generator, size: int = 16) -> Batch:
    """Pictures and their classes."""
    return {"pixel_values": torch.randn(ROWS, 3, size, size, generator=generator)} | labels(generator, 5)
