"""``torch.utils.checkpoint`` around a function that may raise.

Up to PyTorch 2.12 a function that raises in its forward leaves the hooks of its checkpoint in place for as long as its
traceback is kept, and ``torch.func`` and further checkpoints of the thread fail meanwhile. So the forward never raises
here; the error is raised when the checkpoint has taken its hooks away.

It puts back the state of torch's generators alone for the second run. Here Python's and numpy's go back, too.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.checkpoint import checkpoint

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


def checkpointed(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of a call that the backward makes again.

    Args:
        fn: called as ``fn(*args)``.
        *args: its arguments.
        **options: of ``torch.utils.checkpoint.checkpoint``.

    >>> import torch
    >>> checkpointed(torch.sin, torch.zeros(1, requires_grad=True))
    tensor([0.], grad_fn=<SinBackward0>)
    """
    forward, failures, drawn = True, list[BaseException](), states()

    def guarded(*given: Any) -> Any:
        try:
            if forward:
                return fn(*given)
            with again(drawn):
                return fn(*given)
        except BaseException as error:
            if not forward:
                raise
            failures.append(error)

    result = checkpoint(guarded, *args, use_reentrant=False, **options)
    forward = False
    if failures:
        raise failures.pop()
    return result
