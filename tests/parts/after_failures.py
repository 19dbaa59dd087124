"""What is not as it must be after a step that fails on some rank."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fshard.errors import NonFiniteError, PeerError

TIMEOUT = 20.0
"""Seconds that ranks wait for each other. Nobody has to."""

Steps = Callable[[], tuple[list[Tensor], BaseException | None]]
"""Steps of which one fails: all of their numbers, and what the one that fails has raised."""


def compared(place: str, steps: Steps, want: Sequence[Tensor], point: str, mine: bool) -> list[str]:
    """What is wrong: a wait, an error that is another, or a number that differs.

    Args:
        place: names the failure in messages.
        steps: makes the steps.
        want: the numbers of the same steps without the one that fails.
        point: where it fails; with ``"nan"`` in it by gradients that are not finite, which all ranks see.
        mine: whether it fails on this rank.
    """
    began = time.monotonic()
    got, raised = steps()
    seconds = time.monotonic() - began
    out = [f"somebody waited {seconds:.1f} s"] if seconds > TIMEOUT / 2 else []
    out += _wrong(raised, point, mine)
    pairs = zip(got, want, strict=True)
    out += [f"number {at} differs" for at, pair in enumerate(pairs) if not torch.equal(*pair)]
    return [f"{place}: {line}" for line in out]


def _wrong(raised: BaseException | None, point: str, mine: bool) -> list[str]:
    expected: type[BaseException] = NonFiniteError if "nan" in point else ValueError if mine else PeerError
    if not isinstance(raised, expected):
        return [f"raised {raised!r}"]
    return [] if "nan" in point or "injected" in str(raised) else [f"does not say what failed: {raised}"]
