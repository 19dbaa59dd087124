"""Initial values that are a table: those of positions, which code computes and no draw."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ModuleTable:
    """Values that a whole leaf begins with.

    >>> ModuleTable(torch.arange(6.0).view(2, 3))(0, (2, 3), torch.tensor([1, 4]))
    tensor([1., 4.])
    """

    values: Tensor

    def __call__(self, key: int, shape: tuple[int, ...], index: Tensor) -> Tensor:
        return self.values.reshape(-1)[index.to(self.values.device)].to(index.device, torch.float32)
