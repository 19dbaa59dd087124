"""Sources of named whole tensors that can be read in part, and a train state from one.

A rank reads only the boxes that its pieces consist of. Names, shapes and dtypes are compared with the plan before any
tensor is read, and all misfits come in one report.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fshard.checkpoint.problems import printable
from fshard.checkpoint.ranges import Block, blocks
from fshard.errors import TreeError, lines
from fshard.interchange.rename import RenameLike, apply_rules
from fshard.model.philox import fold
from fshard.optim.base import Optimizer
from fshard.sharding.layout import Leaf, Piece
from fshard.sharding.plan import Plan
from fshard.sharding.spec import Shape
from fshard.state.entries import Entry, entries
from fshard.state.init import Inits, fresh_values, initializers, start
from fshard.state.train_state import TrainState


@dataclass(frozen=True)
class TensorMeta:
    """The shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Named whole tensors that can be read in part."""

    @property
    def name(self) -> str:
        """Its name for errors: a path, or the name of an argument."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """The tensors by name."""

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Copy each block of a tensor to the tensor beside it, which has the block's shape."""


@dataclass(frozen=True)
class MemorySource:
    """A source in memory."""

    name: str
    held: Mapping[str, Tensor]

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """Their shapes and dtypes."""
        return {name: TensorMeta(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Copy."""
        for block, out in parts:
            index = tuple(slice(o, o + n) for o, n in zip(block.offset, block.shape, strict=True))
            out.copy_(self.held[name].detach()[index])


@dataclass(frozen=True)
class Origin:
    """The source's tensors for a leaf.

    Attributes:
        name: the tensor's name in the source.
        transpose: whether its two dims are swapped.
        again: other tensors of the source that must be equal, with the same flag: those of tied leaves.
    """

    name: str
    transpose: bool
    again: tuple[tuple[str, bool], ...] = ()


def originate(
    plan: Plan, source: TensorSource, rename: Sequence[RenameLike], *, fresh: Sequence[str] = (), cast: bool = False
) -> dict[str, Origin]:
    """The origin of each leaf of the plan; leaves in ``fresh`` may be missing.

    Raises:
        PlanError: a rule that matches no name.
        TreeError: tensors are missing, unexpected, of another shape or dtype; all in one report.
    """
    given = apply_rules(rename, source.tensors, source.name)
    paths = {name: path for path, leaf in plan.leaves.items() for name in (path, *leaf.aliases)}
    out, wrong = {}, []
    for path, leaf in plan.leaves.items():
        found = [given[name] for name in (path, *leaf.aliases) if name in given]
        if found:
            out[path] = Origin(*found[0], again=tuple(found[1:]))
            wrong += [text for old in found for text in _misfits(leaf, source.tensors[old[0]], *old, cast)]
        elif path not in fresh:
            wrong.append(f"missing     {path}  {list(leaf.shape)}")
    wrong += [f"unexpected  {_both(old, new)}" for new, (old, _) in given.items() if new not in paths]
    if wrong:
        head = f"{source.name} holds {len(source.tensors)} tensors, which are not the plan's {len(plan.leaves)} leaves:"
        remedy = (
            "Give rename=[(pattern, path)] rules from its names to the plan's paths, (pattern, None) for tensors to "
            "leave out, init=[(pattern, initializer)] for leaves that are new, cast=True to round."
        )
        wrong = [printable(row) for row in wrong]
        raise TreeError(lines(head, sorted(wrong, key=lambda line: line.split(" ")[0]), remedy))
    return out


def load(
    plan: Plan,
    opt: Optimizer,
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
    entry of that state, and the origins of the leaves.
    """
    inits = initializers(plan, init, _absent(plan, source, rename)) if init else {}
    origins = originate(plan, source, rename, fresh=tuple(inits), cast=cast)

    def value(path: str, piece: Piece) -> Tensor:
        leaf, device = plan.leaves[path], plan.mesh.device
        if path not in origins:
            return fresh_values(inits[path], fold(seed, path), leaf.shape, piece, device)
        out = torch.empty(piece.numel, dtype=leaf.dtype, device=device)
        read_piece(source, piece, out, origins[path])
        return out

    state = start(plan, opt, value, step, seed)
    if fill is not None:
        for entry in entries(state):
            if entry.name.startswith("opt."):
                fill(entry, origins)
    return state


def read_piece(source: TensorSource, piece: Piece, out: Tensor, origin: Origin) -> None:
    """Read a piece of a leaf; raises a TreeError if the source has unequal tensors for it."""
    _read(source, piece, out, origin.name, origin.transpose)
    for name, transpose in origin.again:
        other = torch.empty_like(out)
        _read(source, piece, other, name, transpose)
        if not torch.equal(other, out):
            raise TreeError(
                f"{source.name} holds other values in {name} than in {origin.name}, and the model ties them to one "
                f"leaf: leave one out with rename=[({name!r}, None)], or untie the model"
            )


def _read(source: TensorSource, piece: Piece, out: Tensor, name: str, transpose: bool) -> None:
    parts = [(block, out[block.at : block.at + block.numel].view(block.shape)) for block in blocks(piece)]
    if transpose:
        parts = [(Block(block.offset[::-1], block.shape[::-1], 0), part.t()) for block, part in parts]
    if parts:
        source.read(name, parts)


def _absent(plan: Plan, source: TensorSource, rename: Sequence[RenameLike]) -> list[str]:
    given = apply_rules(rename, source.tensors, source.name)
    return [p for p, leaf in plan.leaves.items() if not any(name in given for name in (p, *leaf.aliases))]


def _misfits(leaf: Leaf, stored: TensorMeta, name: str, transpose: bool, cast: bool) -> list[str]:
    """Why a tensor does not fit a leaf."""
    shape, where = stored.shape, _both(name, leaf.path)
    if transpose:
        if len(shape) != 2:
            return [f"mismatched  {where}: {list(shape)} cannot be transposed, which takes two dims"]
        shape = shape[::-1]
    if shape != leaf.shape:
        return [f"mismatched  {where}: {list(shape)}, the plan has {list(leaf.shape)}"]
    if not fits(stored.dtype, leaf.dtype, cast):
        names = [str(dtype).removeprefix("torch.") for dtype in (stored.dtype, leaf.dtype)]
        return [f"mismatched  {where}: {names[0]} would be rounded to {names[1]}"]
    return []


def fits(have: torch.dtype, want: torch.dtype, cast: bool) -> bool:
    """Whether a dtype converts to another without rounding, or between floats with ``cast``."""
    if have == want:
        return True
    if not (have.is_floating_point and want.is_floating_point):
        return False
    a, b = torch.finfo(have), torch.finfo(want)
    return cast or (b.eps <= a.eps and b.max >= a.max and b.smallest_normal <= a.smallest_normal)


def _both(old: str, new: str) -> str:
    return old if old == new else f"{new} (as {old})"
