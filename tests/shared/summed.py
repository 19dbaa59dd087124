"""A loss that communicates."""

from typing import Any

from torch import Tensor

from fshard.collectives import psum


class Summed:
    """A loss with a collective of its own, before which a rank can be told to raise."""

    bad = False

    def __call__(self, p: Any, x: Tensor) -> Tensor:
        if self.bad:
            raise ValueError("no data here")
        total = psum((p["w"].detach() * x).sum(), "shard")
        return (p["w"] * x).square().mean() + 0 * total.detach().nan_to_num()
