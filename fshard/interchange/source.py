"""Sources of named whole tensors that can be read in part, and a train state from one.

A rank reads only the boxes that its pieces consist of. Names, shapes and dtypes are compared with the plan before any
tensor is read, and all misfits come in one report. ``read_box`` reads one box of a file into place.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fshard.checkpoint.ranges import blocks
from fshard.checkpoint.tensorfile import TensorMeta
from fshard.checkpoint.write import raw
from fshard.errors import TreeError, lines
from fshard.interchange.rename import RenameLike, apply_rules, unwrapped
from fshard.model.philox import fold
from fshard.optim.base import Optimizer
from fshard.reading.files import File, printable
from fshard.sharding.layout import Piece
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.entries import entries
from fshard.state.init import Inits, fresh_values, initializers, start
from fshard.state.pieces import Entry
from fshard.state.train_state import TrainState


class TensorSource(Protocol):
    """Named whole tensors that can be read in part."""

    @property
    def name(self) -> str:
        """Its name for errors: a path, or the name of an argument."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """The tensors by name."""

    def read(self, name: str, parts: Sequence[tuple[Shape, Tensor]]) -> None:
        """Fill tensors with boxes of the named tensor, each given by its offset and the tensor to fill."""


@dataclass(frozen=True)
class MemorySource:
    """A source in memory."""

    name: str
    held: Mapping[str, Tensor]

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """Their shapes and dtypes."""
        return {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def read(self, name: str, parts: Sequence[tuple[Shape, Tensor]]) -> None:
        """Copy."""
        for offset, out in parts:
            out.copy_(self.held[name].detach()[tuple(slice(o, o + n) for o, n in zip(offset, out.shape, strict=True))])


class PrefixSource:
    """The tensors of a source whose names begin with a prefix, by the rest of their names."""

    def __init__(self, source: TensorSource, prefix: str, without: str | None = None) -> None:
        self.name, self.source, self.prefix = source.name, source, prefix
        self.tensors = {
            name.removeprefix(prefix): meta
            for name, meta in source.tensors.items()
            if name.startswith(prefix) and (without is None or not name.startswith(without))
        }

    def read(self, name: str, parts: Sequence[tuple[Shape, Tensor]]) -> None:
        """Read under the full name."""
        self.source.read(self.prefix + name, parts)


class PartSource:
    """The tensors of a source without some of them."""

    def __init__(self, source: TensorSource, without: Container[str]) -> None:
        self.name, self.read = source.name, source.read
        self.tensors = {name: meta for name, meta in source.tensors.items() if name not in without}


Origin = Sequence[tuple[str, bool]]
"""The names of a leaf's tensors in a source, each with whether its two dims are swapped: the first is read, and the
others, those of tied leaves, must be equal to it."""


def load(
    plan: Plan,
    opt: Optimizer | None,
    source: TensorSource,
    *,
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    cast: bool = False,
    step: int = 0,
    fill: Callable[[Entry, Mapping[str, Origin]], None] | None = None,
) -> TrainState:
    """A state whose parameters come from a source, with the arguments of ``load_hf``. Local.

    Each rank reads only its own part. The optimizer's state is new, unless ``fill`` is given: it is called with each
    entry of that state, and the origins of the leaves, which are empty for new leaves.
    """
    known = {name for path, leaf in plan.leaves.items() for name in (path, *leaf.aliases)}
    names = unwrapped(apply_rules(rename, source.tensors, source.name), known)
    origins = {
        path: [names[name] for name in (path, *leaf.aliases) if name in names] for path, leaf in plan.leaves.items()
    }
    inits = initializers(plan, init, [path for path, origin in origins.items() if not origin]) if init else {}
    _check_fit(plan, source, names, origins, inits, cast)

    def value(path: str, piece: Piece) -> Tensor:
        leaf, device = plan.leaves[path], plan.mesh.device
        if not origins[path]:
            return fresh_values(inits[path], fold(seed, path), leaf.shape, piece, device)
        out = torch.empty(piece.numel, dtype=leaf.dtype, device=device)
        read_piece(source, piece, out, origins[path])
        return out

    state = start(plan.own, opt, value, step, seed)
    if fill is not None:
        for entry in entries(state):
            if entry.name.startswith("opt.") and not entry.rows:
                fill(entry, origins)
    return state


def _check_fit(
    plan: Plan,
    source: TensorSource,
    names: Mapping[str, tuple[str, bool]],
    origins: Mapping[str, Origin],
    fresh: Container[str],
    cast: bool,
) -> None:
    """Raise a TreeError that lists all tensors that are missing, unexpected, or of another shape or dtype."""
    wrong = []
    for path, leaf in plan.leaves.items():
        if not origins[path] and path not in fresh:
            wrong.append(f"missing     {path}  {list(leaf.shape)}")
        for name, transpose in origins[path]:
            meta = source.tensors[name]
            problem = misfit(meta, leaf.shape, leaf.dtype, transpose, cast, "the plan has")
            if transpose and len(meta.shape) != 2:
                problem = f"{list(meta.shape)} cannot be transposed, which takes two dims"
            if problem is not None:
                wrong.append(f"mismatched  {_both(name, path)}: {problem}")
    known = {name for path, leaf in plan.leaves.items() for name in (path, *leaf.aliases)}
    wrong += [f"unexpected  {_both(old, new)}" for new, (old, _) in names.items() if new not in known]
    if wrong:
        head = f"{source.name} holds {len(source.tensors)} tensors, which are not the plan's {len(plan.leaves)} leaves:"
        remedy = (
            "Give rename=[(pattern, path)] rules from its names to the plan's paths, (pattern, None) for tensors to "
            "leave out, init=[(pattern, initializer)] for leaves that are new, cast=True to round."
        )
        rows = sorted(map(printable, wrong), key=lambda line: line.split(" ")[0])
        raise TreeError(lines(head, rows, remedy))


def misfit(meta: TensorMeta, shape: Shape, dtype: torch.dtype, transpose: bool, cast: bool, owner: str) -> str | None:
    """Say why a source's tensor cannot be read into one of this shape and dtype; None if it can."""
    have = meta.shape[::-1] if transpose else meta.shape
    if have != shape:
        return f"{list(have)}, {owner} {list(shape)}"
    if meta.dtype == dtype:
        return None
    if meta.dtype.is_floating_point and dtype.is_floating_point:
        a, b = torch.finfo(meta.dtype), torch.finfo(dtype)
        if cast or (b.eps <= a.eps and b.max >= a.max and b.smallest_normal <= a.smallest_normal):
            return None
    names = [str(dtype).removeprefix("torch.") for dtype in (meta.dtype, dtype)]
    return f"{names[0]} would be rounded to {names[1]}"


def read_piece(source: TensorSource, piece: Piece, out: Tensor, origin: Origin) -> None:
    """Read a piece of a leaf; raises a TreeError if the source has unequal tensors for it."""
    _read(source, piece, out, *origin[0])
    for name, transpose in origin[1:]:
        other = torch.empty_like(out)
        _read(source, piece, other, name, transpose)
        if not torch.equal(other, out):
            raise TreeError(
                f"{source.name} holds other values in {name} than in {origin[0][0]}, and the model ties them to one "
                f"leaf: leave one out with rename=[({name!r}, None)], or untie the model"
            )


def _read(source: TensorSource, piece: Piece, out: Tensor, name: str, transpose: bool) -> None:
    parts = [(block.offset, out[block.at : block.at + block.numel].view(block.shape)) for block in blocks(piece)]
    if transpose:
        parts = [(offset[::-1], part.t()) for offset, part in parts]
    if parts:
        source.read(name, parts)


def _both(old: str, new: str) -> str:
    return old if old == new else f"{new} (as {old})"


SLAB = 4 << 20
"""Bytes of a file that are read at a time if only parts of rows are needed."""


def read_box(
    file: File, begin: int, shape: Sequence[int], offset: Sequence[int], out: Tensor, dtype: torch.dtype
) -> None:
    """Copy the box at ``offset`` of a row-major tensor to ``out``, of any dtype and device, with a few MiB of memory.

    The tensor lies in the file from byte ``begin`` on, and has this shape and dtype.
    """
    if not out.numel():
        return
    if not shape:
        return read_box(file, begin, (1,), (0,), out.view(1), dtype)
    width = dtype.itemsize
    row = math.prod(shape[1:]) * width
    if row > SLAB:
        for at in range(out.shape[0]):
            read_box(file, begin + (offset[0] + at) * row, shape[1:], offset[1:], out[at], dtype)
        return None
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(o * n for o, n in zip(offset[1:], strides[1:], strict=True)) * width
    last = first + (sum((size - 1) * n for size, n in zip(out.shape[1:], strides[1:], strict=True)) + 1) * width
    whole = tuple(out.shape[1:]) == tuple(shape[1:])
    step = max(1, SLAB // row)
    for at in range(0, out.shape[0], step):
        part = out[at : at + step]
        low = begin + (offset[0] + at) * row + first
        high = begin + (offset[0] + at + part.shape[0] - 1) * row + last
        if whole and part.dtype == dtype and part.device.type == "cpu" and part.is_contiguous():
            file.fill(raw(part), low)
        else:
            read = torch.frombuffer(file.read(low, high), dtype=dtype)
            part.copy_(read.as_strided(tuple(part.shape), tuple(strides)))
    return None
