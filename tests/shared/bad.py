"""What tests of bad input share: a small tree of three units, and errors that travel between processes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P

FLAT = [(r".*", fs.fsdp("shard"))]


def weights() -> dict[str, Any]:
    """A tree of three units."""
    draw = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) / 3

    return {
        "first": {"w": normal(9, 6), "b": torch.zeros(9)},
        "middle": {"w": normal(9, 9)},
        "last": {"w": normal(3, 9), "b": torch.zeros(3)},
    }


UNITS = ("first", "middle", "last")


def place(mesh: fs.Mesh, rules: Any = FLAT) -> fs.Plan:
    """The plan of the tree."""
    return fs.make_plan(weights(), mesh, rules, batch=P("shard"), units=UNITS)


def rule() -> Any:
    """The update rule of these tests."""
    return fs.optim.sgd(0.05, momentum=0.9)


@dataclass(frozen=True)
class Raised:
    """An exception as it travels back: its class names, outermost base last, and its text."""

    kinds: tuple[str, ...]
    text: str


def attempt(call: Callable[[], Any]) -> Raised | None:
    """What a call raised; None if it returned."""
    try:
        call()
    except Exception as error:
        return Raised(tuple(kind.__name__ for kind in type(error).__mro__), str(error))
    return None


def alike(raised: list[Raised | None], kind: str, says: tuple[str, ...]) -> None:
    """Every rank raised the same error of this kind, which holds these parts."""
    assert all(error is not None for error in raised), raised
    assert len({error.text for error in raised if error}) == 1, raised
    error = raised[0]
    assert error is not None
    assert kind in error.kinds and "ShardError" in error.kinds, error
    assert not [part for part in says if part not in error.text], error.text
