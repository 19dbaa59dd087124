"""Results of operators on tensors without data, made again from what they were like before.

Shapes, strides and dtypes of the arguments say what a result is like, but for operators that read values. PyTorch
remembers results too; to describe the arguments takes it longer than what is saved here.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard.torch_internals import DisableTorchFunction, FakeTensor, FakeTensorMode, OpOverload, dispatch_keys

PLAIN = frozenset(
    (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of arguments that are compared as they are."""

BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose results depend on values, and of those that change what their argument is like."""

LIFTS = frozenset(("lift", "lift_fresh", "lift_fresh_copy"))
"""Operators that make a constant of a tensor with data."""


class Likeness(NamedTuple):
    """Look of a result.

    Attributes:
        argument: the argument whose memory it is a view of, or that it is; None for memory of its own.
        same: whether it is that argument.
        shape, stride, offset, dtype, device: those of a tensor.
    """

    argument: int | None
    same: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: torch.dtype
    device: torch.device

    def made(self, mode: FakeTensorMode, args: Any) -> Any:
        """Return a tensor like it, without data."""
        if self.same:
            return args[self.argument]
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if self.argument is not None:
            made.set_(args[self.argument].untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(mode, made, self.device)


class Results(NamedTuple):
    """Looks of the results of a call.

    Attributes:
        kind: the container that holds them; None for a single one.
        each: their likenesses; None in the place of no tensor.
    """

    kind: type | None
    each: tuple[Likeness | None, ...]

    def made(self, mode: FakeTensorMode, args: Any) -> Any:
        """Return tensors like them, without data."""
        with DisableTorchFunction():
            found = [like and like.made(mode, args) for like in self.each]
        return found[0] if self.kind is None else self.kind(found)


class OperatorCall(tuple[Any, ...]):
    """Description of a call of an operator, equal to others whose results look the same."""

    out: Any

    def answer(self, mode: FakeTensorMode, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Return what the operator returns: made again if it was called so before, or else by a run of it."""
        self.given, self.run = (mode, args, kwargs), run
        try:
            known = seen(self)
            if hasattr(self, "out"):
                return self.out
            return run() if known is None else known.made(mode, args)
        finally:
            vars(self).clear()  # the memory keeps a description, and no tensors


@functools.lru_cache(1 << 16)
def seen(call: OperatorCall) -> Results | None:
    """Run a call that is the first of its kind. Returns what results look like; None where that is not all of them."""
    call.out = call.run()
    return _results(*call.given, call.out)


def _results(mode: FakeTensorMode, args: Any, kwargs: Any, out: Any) -> Results | None:
    kind = type(out) if type(out) in (list, tuple) else None
    given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
    taken = {x.untyped_storage()._cdata for x in given}
    each: list[Likeness | None] = []
    for x in (out,) if kind is None else out:
        like = _likeness(args, x, taken, len(given) == 1) if x is not None else None
        if x is not None and (like is None or not _alike(mode, x, like, args)):
            return None
        each.append(like)
    return Results(kind, tuple(each))


def _likeness(args: Any, x: Any, taken: set[int], single: bool) -> Likeness | None:
    if type(x) is not FakeTensor or x.constant is not None or x.layout is not torch.strided:
        return None
    storage = x.untyped_storage()._cdata
    # What an operator returns is an argument, a view of its only one, or on memory that nothing else has.
    same = [n for n, known in enumerate(args) if known is x]
    views = [n for n, known in enumerate(args) if isinstance(known, Tensor)] if single and storage in taken else []
    number = next(iter(same + views), None)
    if storage in taken and number is None:
        return None
    if number is None:
        taken.add(storage)  # results that share it have no likeness
    return Likeness(number, bool(same), x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device)


def _alike(mode: FakeTensorMode, x: Any, like: Likeness, args: Any) -> bool:
    """Tell whether what is made again is as the operator's own result, storage and dispatch keys included."""
    with DisableTorchFunction():
        made = like.made(mode, args)
    return bool(
        made.untyped_storage().nbytes() == x.untyped_storage().nbytes()
        and made.storage_offset() == x.storage_offset()
        and made.requires_grad == x.requires_grad
        and dispatch_keys(made) == dispatch_keys(x)
    )


@functools.cache
def remembers(func: Any) -> bool:
    """Tell whether results of an operator are like those of all calls with arguments like these."""
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims") or BY_VALUE.intersection(func.tags):
        return False
    name = func._schema.name.partition("::")[2]
    return name not in LIFTS and not any(known.is_out for known in func._schema.arguments)


def described(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> OperatorCall | None:
    """Return the description of a call; None where its results may depend on more."""
    if not remembers(func):
        return None
    key = [func, torch.get_default_dtype(), *kwargs]
    if _describe(mode, args, key) and _describe(mode, kwargs.values(), key):
        return OperatorCall(key)
    return None


def _describe(mode: FakeTensorMode, values: Iterable[Any], key: list[Any]) -> bool:
    for x in values:
        kind = type(x)
        if kind is FakeTensor:
            if x.fake_mode is not mode or x.constant is not None or x.layout is not torch.strided:
                return False
            if x.dtype.is_complex or x.is_neg():
                return False
            key.append((x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device, x.requires_grad))
        elif kind in PLAIN:
            if x != x:  # not a number, which no key would equal
                return False
            key += (kind, x)  # 1, 1.0 and True are equal, and give results of different dtypes
        elif kind is list or kind is tuple:
            key += (kind, len(x))
            if not _describe(mode, x, key):
                return False
        else:
            return False
    return True
