"""The context in which the ops of a graph run: below autograd and autocast."""

from typing import Any

import torch
from torch._C import _AutoDispatchBelowADInplaceOrView as Below


class Uncast:
    """``Below``, without autocast too: what it casts is in the graph."""

    def __enter__(self) -> None:
        self.guards = Below(), torch._C._DisableAutocast()
        for guard in self.guards:
            guard.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        for guard in reversed(self.guards):
            guard.__exit__(*error)


def quiet() -> Any:
    """The context in which a graph's ops run: nobody but their kernels sees them."""
    return Uncast() if torch._C._is_any_autocast_enabled() else Below()
