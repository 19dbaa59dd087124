"""Tensors that stand for parts of named ones: code that stacks, cuts or turns them says where each element comes from.

Conversions of other libraries run on them. Their results are read box by box, so that a rank reads only its own part.
What other operators make is computed of whole tensors, when it is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.sharding.spec import Shape

Read = Callable[[str, Sequence[tuple[Shape, Tensor]]], None]
"""As ``TensorSource.read``: fill tensors with boxes of the named one, each given by its offset."""


@dataclass(frozen=True)
class Box:
    """A box of a woven tensor, and the box of a named tensor that fills it.

    Attributes:
        at: its offset in the woven tensor.
        shape: its sizes there.
        name: of the tensor that it comes from.
        offset: its offset there.
        dims: for each dim of the woven tensor, the named one's dim that runs along it; None for a dim of size 1 that
            the named one does not have. Dims of the named tensor that are missing have size 1 in the box.
    """

    at: Shape
    shape: Shape
    name: str
    offset: Shape
    dims: tuple[int | None, ...]

    def shared(self, begin: Shape, sizes: Shape) -> "Box | None":
        """The part of it in another box of the woven tensor, with its offset there; None if there is none."""
        low = [max(a, b) for a, b in zip(self.at, begin, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(self.at, self.shape, begin, sizes, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        offset = list(self.offset)
        for dim, a, b in zip(self.dims, low, self.at, strict=True):
            if dim is not None:
                offset[dim] += a - b
        shape = tuple(b - a for a, b in zip(low, high, strict=True))
        return replace(
            self, at=tuple(a - b for a, b in zip(low, begin, strict=True)), shape=shape, offset=tuple(offset)
        )

    def without(self, dim: int) -> "Box":
        """It without a dim of size 1."""
        return replace(self, at=_cut(self.at, dim), shape=_cut(self.shape, dim), dims=_cut(self.dims, dim))

    def turned(self, order: Sequence[int]) -> "Box":
        """It with its dims in another order."""
        at, shape = (tuple(row[i] for i in order) for row in (self.at, self.shape))
        return replace(self, at=at, shape=shape, dims=tuple(self.dims[i] for i in order))

    def fill(self, out: Tensor, read: Read) -> None:
        """Read it into the tensor of which it is a part."""
        part = out[tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))]
        new = [i for i, dim in enumerate(self.dims) if dim is None]
        part = part.squeeze(new) if new else part
        kept = [dim for dim in self.dims if dim is not None]
        part = part.permute(sorted(range(len(kept)), key=kept.__getitem__))
        for dim in range(len(self.offset)):
            part = part if dim in kept else part.unsqueeze(dim)
        read(self.name, [(self.offset, part)])


class Woven(Tensor):
    """A tensor without memory, whose elements are those of named tensors.

    Attributes:
        boxes: what it consists of; None if it is computed.
        compute: what it is otherwise, of whole tensors that are read.
        names: the tensors that it reads.
    """

    boxes: tuple[Box, ...] | None
    compute: Callable[[Read], Tensor] | None
    names: frozenset[str]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Iterable[Box] | None,
        compute: Callable[[Read], Tensor] | None = None,
        names: frozenset[str] = frozenset(),
    ) -> "Woven":
        made: Woven = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))
        made.boxes, made.compute = None if boxes is None else tuple(boxes), compute
        made.names = names if made.boxes is None else frozenset(box.name for box in made.boxes)
        return made

    @classmethod
    def of(cls, name: str, shape: Sequence[int], dtype: torch.dtype) -> "Woven":
        """A named tensor itself."""
        zeros, whole = (0,) * len(shape), tuple(shape)
        return cls(shape, dtype, [Box(zeros, whole, name, zeros, tuple(range(len(whole))))])

    def fill(self, offset: Shape, out: Tensor, read: Read) -> None:
        """Fill a tensor with a box of it."""
        if self.boxes is None:
            assert self.compute is not None
            whole = self.compute(read)
            out.copy_(whole[tuple(slice(o, o + n) for o, n in zip(offset, out.shape, strict=True))])
            return
        for box in self.boxes:
            if (part := box.shared(offset, tuple(out.shape))) is not None:
                part.fill(out, read)

    def whole(self, read: Read) -> Tensor:
        """All of it."""
        out = torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        self.fill((0,) * self.ndim, out, read)
        return out

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree.leaves((args, kwargs)) if isinstance(leaf, Woven)]
        rule = _RULES.get(func)
        if rule is not None and all(leaf.boxes is not None for leaf in given) and not kwargs:
            return rule(*args)
        return _computed(func, args, dict(kwargs or {}))


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator makes, as tensors that are computed when they are read."""
    if func._schema.is_mutable:
        raise NotImplementedError(f"{func} writes to its arguments")

    def run(given: Callable[[Woven], Tensor]) -> Any:
        held, named = tree.mapped(lambda x: given(x) if isinstance(x, Woven) else x, (args, kwargs))
        return func(*held, **named)

    found = run(lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"))
    names = frozenset[str]().union(*(x.names for x in tree.leaves((args, kwargs)) if isinstance(x, Woven)))
    if isinstance(found, Tensor):
        return Woven(found.shape, found.dtype, None, lambda read: run(lambda x: x.whole(read)), names)

    def one(number: int) -> Callable[[Read], Tensor]:
        return lambda read: run(lambda x: x.whole(read))[number]

    return [Woven(row.shape, row.dtype, None, one(number), names) for number, row in enumerate(found)]


def _cut(row: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*row[:dim], *row[dim + 1 :])


def _put(row: tuple[Any, ...], dim: int, value: Any) -> tuple[Any, ...]:
    return (*row[:dim], value, *row[dim:])


def _boxes(x: Woven) -> tuple[Box, ...]:
    assert x.boxes is not None
    return x.boxes


def _same(x: Woven, *_: Any) -> Woven:
    return Woven(x.shape, x.dtype, _boxes(x))


def _slice(x: Woven, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if step != 1:
        return _computed(torch.ops.aten.slice.Tensor, (x, dim, start, end, step), {})
    dim, (begin, stop, _) = dim % x.ndim, slice(start, end).indices(x.shape[dim])
    low, sizes = [0] * x.ndim, list(x.shape)
    low[dim], sizes[dim] = begin, max(stop - begin, 0)
    return Woven(sizes, x.dtype, _within(x, tuple(low), tuple(sizes)))


def _within(x: Woven, low: Shape, sizes: Shape) -> Iterator[Box]:
    return (found for box in _boxes(x) if (found := box.shared(low, sizes)) is not None)


def _select(x: Woven, dim: int, index: int) -> Woven:
    dim, index = dim % x.ndim, index % x.shape[dim]
    low, sizes = [0] * x.ndim, list(x.shape)
    low[dim], sizes[dim] = index, 1
    boxes = (box.without(dim) for box in _within(x, tuple(low), tuple(sizes)))
    return Woven(_cut(tuple(x.shape), dim), x.dtype, boxes)


def _split(x: Woven, size: int | Sequence[int], dim: int = 0) -> list[Woven]:
    total = x.shape[dim]
    sizes = [min(size, total - at) for at in range(0, total, size)] if isinstance(size, int) else list(size)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [_slice(x, dim, end - n, end) for n, end in zip(sizes, ends, strict=True)]


def _permute(x: Woven, order: Sequence[int]) -> Woven:
    order = [dim % x.ndim for dim in order]
    return Woven([x.shape[i] for i in order], x.dtype, [box.turned(order) for box in _boxes(x)])


def _transpose(x: Woven, a: int = 0, b: int = 1) -> Woven:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return _permute(x, order)


def _unsqueeze(x: Woven, dim: int) -> Woven:
    dim %= x.ndim + 1
    boxes = [
        replace(box, at=_put(box.at, dim, 0), shape=_put(box.shape, dim, 1), dims=_put(box.dims, dim, None))
        for box in _boxes(x)
    ]
    return Woven(_put(tuple(x.shape), dim, 1), x.dtype, boxes)


def _squeeze(x: Woven, dim: int) -> Woven:
    return _select(x, dim, 0) if x.shape[dim] == 1 else _same(x)


def _cat(tensors: Sequence[Woven], dim: int = 0) -> Any:
    if not all(isinstance(x, Woven) for x in tensors) or len({x.dtype for x in tensors}) > 1:
        return _computed(torch.ops.aten.cat.default, (tensors, dim), {})
    dim, boxes, at = dim % tensors[0].ndim, list[Box](), 0
    for x in tensors:
        boxes += [replace(box, at=(*box.at[:dim], box.at[dim] + at, *box.at[dim + 1 :])) for box in _boxes(x)]
        at += x.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = at
    return Woven(shape, tensors[0].dtype, boxes)


def _stack(tensors: Sequence[Woven], dim: int = 0) -> Any:
    return _cat([_unsqueeze(x, dim) for x in tensors], dim)


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.slice.Tensor: _slice,
    _aten.select.int: _select,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split,
    _aten.unbind.int: lambda x, dim=0: [_select(x, dim, i) for i in range(x.shape[dim])],
    _aten.permute.default: _permute,
    _aten.transpose.int: _transpose,
    _aten.t.default: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.cat.default: _cat,
    _aten.stack.default: _stack,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
}
"""The operators that move boxes."""
