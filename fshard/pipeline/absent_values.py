"""Values without data: what units of other stages compute, as the code of a loss function meets it.

An *absent* value is a fake tensor: it has a shape and no data, and so has whatever is computed from it. The code
between units does the same with absent values in each microbatch. So the first one runs it on fake tensors, which takes
PyTorch some hundred microseconds an op, and the others find each result where the first one left it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fshard import tree
from fshard.torch_internals import DisableTorchFunctionSubclass, FakeTensor, FakeTensorMode

T = TypeVar("T")

PLAIN = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are equal if their values are."""


class AbsentTensor(FakeTensor):
    """A tensor without data, whose results are looked up.

    Attributes:
        results: where they are found.
    """

    results: "AbsentResults"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a function that was given an absent value."""
        found = next(_absent_in([args, kwargs]), None)
        if found is None:  # a static method, or a container that is not looked into
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return found.results.of(func, args, kwargs or {})


class _Entry(NamedTuple):
    """A call that was made, and what it returned."""

    func: Any
    args: Any
    kwargs: Any
    result: Any


class AbsentResults:
    """Holds the results of functions for absent values, in the order of their calls.

    Args:
        mode: makes fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.entries: list[_Entry] = []
        self.at = 0

    def begin(self) -> None:
        """Begin a microbatch: the same calls are expected as in the one before."""
        self.at = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make an absent value."""
        with self.mode:
            return self._own(torch.empty(shape, dtype=dtype, device=device))

    def like(self, value: Tensor) -> Tensor:
        """Make an absent value of the shape, strides and dtype of a tensor."""
        with self.mode:
            return self._own(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device))

    def of(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a function returned for these arguments, or call it on fake tensors if this is another call."""
        at, self.at = self.at, self.at + 1
        if at < len(self.entries):
            entry = self.entries[at]
            if entry.func == func and _equal(entry.args, args) and _equal(entry.kwargs, kwargs):
                return _given(entry.result)
            del self.entries[at:]
        with DisableTorchFunctionSubclass(), torch.no_grad():  # no value that a loss is made of comes from here
            result = tree.mapped(self._own, func(*args, **kwargs))
        if len(self.entries) == at:
            self.entries.append(_Entry(func, _described(args), _described(kwargs), result))
        return _given(result)

    def _own(self, value: T) -> T:
        """Have the results of a fake tensor be looked up, too."""
        if isinstance(value, FakeTensor):
            value.__class__ = AbsentTensor  # type: ignore[assignment]
            value.results = self  # type: ignore[attr-defined]
        return value


def _absent_in(values: Any) -> Iterator[AbsentTensor]:
    """The absent values in arguments."""
    if isinstance(values, AbsentTensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _absent_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from _absent_in(value)


class _Meta(NamedTuple):
    """The traits of a tensor that has data, by which a result depends on it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def _described(value: Any) -> Any:
    """Arguments without the memory of tensors that have data."""
    if isinstance(value, Tensor) and not isinstance(value, AbsentTensor):
        return _Meta(value.shape, value.stride(), value.dtype, value.device) if _is_strided(value) else object()
    if type(value) in (list, tuple):
        return type(value)([_described(x) for x in value])
    if type(value) is dict:
        return {key: _described(x) for key, x in value.items()}
    return value


def _given(result: Any) -> Any:
    """A result that the caller may change: a list of its own."""
    return list(result) if type(result) is list else result


def _is_strided(value: Tensor) -> bool:
    return value.layout is torch.strided


def _equal(known: Any, given: Any) -> bool:
    """Tell whether an argument is what was described: the same absent value, or one that makes no difference."""
    if isinstance(given, AbsentTensor):
        return known is given
    if isinstance(given, Tensor):
        return type(known) is _Meta and _is_strided(given) and known == _described(given)
    if type(known) is not type(given):
        return False
    if type(given) in (list, tuple):
        return len(known) == len(given) and all(map(_equal, known, given))
    if type(given) is dict:
        return list(known) == list(given) and all(map(_equal, known.values(), given.values()))
    if type(given) is slice:
        return _equal((known.start, known.stop, known.step), (given.start, given.stop, given.step))
    return known is given or isinstance(given, PLAIN) and bool(known == given)
