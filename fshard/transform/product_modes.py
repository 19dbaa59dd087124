"""Two modes of one product: forward derivatives, or reverse ones where an operator has none."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fshard.errors import ShardError, TransformError
from fshard.model.model_refusals import NO_FORWARD, explained
from fshard.sharding.plan import Plan

Flat = dict[str, Tensor]


@dataclass(frozen=True)
class ProductModes:
    """Two modes of one product: forward derivatives, until an operator turns out to have none; then reverse ones."""

    missing: list[str] = field(default_factory=list)

    def run(self, by_forward: Callable[[], Any], by_reverse: Callable[[], Any]) -> Any:
        """The product. All ranks run one program, so they find the same operators."""
        if not self.missing:
            try:
                with explained("the function"):
                    return by_forward()
            except RuntimeError as error:
                text = str(error)
                # The other errors of this library may quote a call of fs.func.jvp.
                refused = isinstance(error, ShardError) and not isinstance(error, TransformError)
                if refused or not any(part in text for part in _NO_FORWARD):
                    raise
                self.missing.append(text)
        with explained("the function"):
            return by_reverse()


_NO_FORWARD = (NO_FORWARD, "forward AD", "forward mode AD", "ZeroTensors are immutable", "jvp")
"""Parts of errors about missing forward derivatives."""


def direction_of(plan: Plan, trained: Flat, v: Any) -> Flat:
    """The direction of the differentiated leaves."""
    direction = plan.check_tree(v, whole=False, what="v")
    return {path: direction[path].contiguous() for path in trained}
