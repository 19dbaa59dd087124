"""``torch.utils.checkpoint`` around a function that may raise.

Up to PyTorch 2.12 a function that raises in its forward leaves the hooks of its checkpoint in place for as long as its
traceback is kept, and ``torch.func`` and further checkpoints of the thread fail meanwhile. So the forward never raises
here; the error is raised when the checkpoint has taken its hooks away.

It puts back the state of torch's generators alone for the second run. Here Python's and numpy's go back, too.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from fshard.model import draws


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
    forward, failures, drawn = True, list[BaseException](), draws.states()

    def guarded(*given: Any) -> Any:
        try:
            if forward:
                return fn(*given)
            with draws.again(drawn):
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
