"""Operators whose rules for fake tensors are narrower than they are.

PyTorch decides twice what an operator takes: in its kernel, and in a rule on shapes and dtypes for tensors without
data. The second sometimes refuses what the first does well (in 2.13 the grouped matrix product of float32, with which
mixtures of experts compute). So what a rule refuses is asked of the kernel, once, on zeros of the same shapes.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.arguments import kind
from fshard.errors import ShardError
from fshard.runtime.engine.fake_results import described
from fshard.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

VALUES_NEEDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""What fake tensors raise where a program asks for a value, or calls an operator that knows only real ones."""

FAKE_ONLY = ("tensor subclasses", "FakeTensor", "fake impl", "INTERNAL ASSERT FAILED", "data is not allocated yet")
"""What else they say, in errors of no class of their own: at ``.numpy()``, at a data pointer, at custom operators, and
where PyTorch takes them for real ones (a ``vmap`` of a Hessian, of rows that begin inside of a storage)."""

MOST = 12
"""Leaves of a batch that an error lists."""


def needs_values(error: Exception) -> bool:
    """Tell whether a program failed on tensors without data because they have none."""
    text = str(error) if isinstance(error, RuntimeError | TypeError) else ""
    # Some derivatives of fake tensors are on the meta device, such as those of a vmap of a Hessian.
    lost = "at least two devices" in text and "meta" in text
    return lost or any(said in text for said in FAKE_ONLY) or isinstance(error, VALUES_NEEDED)


class KernelFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode in which an error of an operator counts only if its kernel raises one, too.

    It makes results again that it has seen the like of, in any trace of the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.remembers, self.cache_enabled = self.cache_enabled and not self.cache_crosscheck_enabled, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or return what it has returned for arguments like these."""
        kwargs = kwargs or {}
        run = functools.partial(self._run, func, types, args, kwargs)
        call = described(self, func, args, kwargs) if self.remembers else None
        return run() if call is None else call.answer(self, args, kwargs, run)

    def _run(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except VALUES_NEEDED:
            raise
        except RuntimeError:
            # Only torch's own: they change nothing but their arguments, which here are made for the purpose.
            found = _on_zeros(func, args, kwargs) if getattr(func, "namespace", "") == "aten" else None
            if found is None:
                raise
            return tree.mapped(lambda x: self.from_tensor(x) if isinstance(x, Tensor) else x, found[0])


def _on_zeros(func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """Return what the kernel returns for zeros; None if it raises."""
    with unset_fake_temporarily():
        try:
            return (func(*tree.mapped(_zeros, args), **tree.mapped(_zeros, kwargs)),)
        except RuntimeError:
            return None


def _zeros(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).zero_()


@contextlib.contextmanager
def explaining(batch: Any) -> Iterator[None]:
    """Add to what a program raises of itself what it was called with: its author sees no batch of fake tensors."""
    try:
        yield
    except ShardError:
        raise
    except Exception as error:
        parts = zip(tree.names(batch, "batch"), tree.leaves(batch), strict=True)
        rows = [f"  {name}: {_described(leaf)}" for name, leaf in parts]
        more = [f"  ... and {len(rows) - MOST} more"] if len(rows) > MOST else []
        head = (
            "The function of (params, batch) was run on tensors without data, to find its schedule. This rank's batch:"
        )
        error.add_note("\n".join([head, *rows[:MOST], *more, *_empty(batch)]))
        raise


def _empty(batch: Any) -> list[str]:
    """Say that a batch has no rows, if so."""
    tensors = [leaf for leaf in tree.leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    if not tensors or any(map(len, tensors)):
        return []
    return [
        "No tensor of it has a row: look at the data set, or return fs.Mean(total, count) where ranks may have none."
    ]


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return f"{kind(leaf)}, which is not a tensor"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Fake tensors log a stack trace of every error that they raise: the error itself is enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    refused = functools.partial(_refused)  # of its own: the end of a call inside of this one must not take it away
    logger.addFilter(refused)
    try:
        yield
    finally:
        logger.removeFilter(refused)


def _refused(record: logging.LogRecord) -> bool:
    return "failed while attempting to run meta" not in record.getMessage()
