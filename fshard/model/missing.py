"""Derivatives that PyTorch does not have: the unit, the operator, and the way out."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from fshard.errors import TransformError

MISSING = re.compile(
    r"derivative for '?(?:aten::)?(?P<op>\w+)'? is not implemented"
    r"|use forward AD with (?:aten::)?(?P<forward>\w+) that does not support it"
    r"|function '(?P<by>\w+)' is not differentiable with respect to argument '(?P<argument>\w+)'"
)
"""PyTorch's errors about operators without a derivative."""

NO_FORWARD = "has no forward derivative"
"""A part of the error about an operator without one."""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Around a derivative: name the operator that has none.

    Args:
        what: whose derivative it is, such as ``"unit blocks.0"``; empty if nothing is known of it.

    Raises:
        TransformError: PyTorch lacks a derivative.
    """
    try:
        yield
    except TransformError:
        raise
    except RuntimeError as error:
        found = MISSING.search(str(error))
        if found is None:
            raise
        raise _missing(what, found) from error


def _missing(what: str, found: re.Match[str]) -> TransformError:
    where = f"in {what}, " if what else ""
    if found["by"]:
        return TransformError(
            f"{where}{found['by']} has no derivative by its argument {found['argument']!r}, which depends on what the "
            f"derivative is taken by: give it {found['argument']}.detach() if it is a constant"
        )
    if found["forward"]:
        return TransformError(
            f"{where}PyTorch's operator {found['forward']} {NO_FORWARD}: take reverse ones, torch.func.vjp in "
            f"the place of torch.func.jvp, or use fs.func.hvp and fs.func.jvp, which do so where they must"
        )
    op = found["op"]
    order = "derivative of this order" if op.endswith("_backward") else "derivative"
    return TransformError(
        f"{where}PyTorch's operator {op} has no {order}: compute it of other operators "
        f"(torch.exp, where, matmul, ... have derivatives of all orders), or keep it out of the differentiated part by "
        f".detach()"
    )
