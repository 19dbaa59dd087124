"""Unit graphs: each distinct unit is traced once, and its calls run the graph instead of the unit's Python."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fshard.model.unit import Unit


class Compiled(Protocol):
    """Runs calls of units in another way than by their functions."""

    def call(
        self, unit: Unit, name: str, index: int, params: Any, leaves: list[Tensor], paths: Sequence[str], args: Any
    ) -> tuple[bool, Any]:
        """Run a call, or do not; and its result."""

    def transformed(self, name: str) -> None:
        """A unit is called under a transform of ``torch.func``, as code outside of units is."""
