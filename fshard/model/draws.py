"""The states of the random generators of Python and numpy, as values that can be put back."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

States = tuple[Any, Any]
"""The state of Python's generator, and that of numpy's; None where numpy was not imported."""


def states() -> States:
    """The states of both.

    >>> before = states()
    >>> drawn(before, states()), random.random() < 1, drawn(before, states())
    (False, True, True)
    """
    numpy = sys.modules.get("numpy")
    found = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), (found[0], found[1].tobytes(), *found[2:]) if isinstance(found, tuple) else None


def restore(before: States) -> None:
    """Let both draw from these states on."""
    python, arrays = before
    random.setstate(python)
    if arrays is not None:
        numpy = sys.modules["numpy"]
        numpy.random.set_state((arrays[0], numpy.frombuffer(arrays[1], numpy.uint32), *arrays[2:]))


def drawn(before: States, after: States) -> bool:
    """Tell whether numbers were drawn between these states."""
    return before[0] != after[0] or (None not in (before[1], after[1]) and before[1] != after[1])


@contextmanager
def again(before: States) -> Iterator[None]:
    """Inside, both draw from these states on; after it they are as they were."""
    now = states()
    try:
        restore(before)
        yield
    finally:
        restore(now)
