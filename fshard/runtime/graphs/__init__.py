"""Unit graphs: each distinct unit is traced once, and its calls run the graph instead of the unit's Python."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fshard.model.unit import Unit


class Compiled(Protocol):
    """Runs calls of units as graphs."""

    def call(
        self, unit: Unit, name: str, index: int, params: Any, leaves: list[Tensor], paths: Sequence[str], args: Any
    ) -> tuple[bool, Any]:
        """Run a call, if it has a graph: whether it ran, and its result.

        ``index`` counts earlier calls of that name in this pass; ``leaves`` are those of ``params``, with their paths;
        ``args`` are ``(args, kwargs)``.
        """

    def transformed(self, name: str) -> None:
        """Record a unit that is called under a transform of ``torch.func``, which runs no graph."""
