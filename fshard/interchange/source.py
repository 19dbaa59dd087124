"""Sources: whatever holds named whole tensors that can be read in part, and a train state from one.

A rank asks a source for the boxes that its pieces consist of, and nothing else is read. What does not fit the plan is
found from names, shapes and dtypes alone, before any tensor is read, and comes in one report.
"""

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
class Stored:
    """What is known of a tensor without reading it."""

    shape: Shape
    dtype: torch.dtype


class Source(Protocol):
    """Named whole tensors that can be read in part."""

    @property
    def name(self) -> str:
        """What it is, for errors: a path, or the name of an argument."""

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """What there is."""

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Write what lies in each block of a tensor to the tensor beside it, which has the block's shape."""


@dataclass(frozen=True)
class Tensors:
    """A source in memory."""

    name: str
    held: Mapping[str, Tensor]

    @property
    def tensors(self) -> Mapping[str, Stored]:
        """Their shapes and dtypes."""
        return {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in self.held.items()}

    def read(self, name: str, parts: Sequence[tuple[Block, Tensor]]) -> None:
        """Copy."""
        for block, out in parts:
            out.copy_(self.held[name].detach()[index_of(block)])


@dataclass(frozen=True)
class Origin:
    """Where a leaf comes from.

    Attributes:
        name: the tensor in the source.
        transpose: whether its dims change places.
        again: other tensors of the source that must hold the same: those of tied leaves.
    """

    name: str
    transpose: bool
    again: tuple[tuple[str, bool], ...] = ()


def originate(
    plan: Plan, source: Source, rename: Sequence[RenameLike], *, fresh: Sequence[str] = (), cast: bool = False
) -> dict[str, Origin]:
    """Where each leaf of the plan comes from.

    Args:
        plan: the plan.
        source: what there is.
        rename: rules from the source's names to paths.
        fresh: leaves that may be missing.
        cast: whether floating-point tensors may be rounded to the leaf's dtype.

    Raises:
        PlanError: a rule that decides nothing.
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
            "Give rename=[(pattern, path)] rules from its names to the plan's paths, (pattern, None) for what to leave "
            "out, init=[(pattern, initializer)] for leaves that are new, cast=True to round."
        )
        wrong = [printable(row) for row in wrong]
        raise TreeError(lines(head, sorted(wrong, key=lambda line: line.split(" ")[0]), remedy))
    return out


def load(
    plan: Plan,
    opt: Optimizer,
    source: Source,
    *,
    rename: Sequence[RenameLike] = (),
    init: Inits = (),
    seed: int = 0,
    cast: bool = False,
    step: int = 0,
    moments: Callable[[Entry, Mapping[str, Origin]], None] | None = None,
) -> TrainState:
    """A state whose parameters come from a source. Local: each rank reads what it holds, and nothing else.

    Args:
        plan: the plan.
        opt: the optimizer, whose state starts anew unless ``moments`` fills it.
        source: where parameters come from.
        rename: rules from the source's names to paths.
        init: ``(pattern, initializer)`` rules for leaves that the source does not have.
        seed: of the initial values of those, and of random numbers inside of steps.
        cast: whether floating-point tensors may be rounded to the leaf's dtype.
        step: the number of updates that were made.
        moments: called with each entry of the optimizer's state, and where each leaf comes from.

    Raises:
        PlanError, TreeError: as ``originate``.
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
    for entry in entries(state) if moments is not None else ():
        if moments is not None and entry.name.startswith("opt."):
            moments(entry, origins)
    return state


def read_piece(source: Source, piece: Piece, out: Tensor, origin: Origin) -> None:
    """Read a piece of a tensor.

    Raises:
        TreeError: the source has a tied leaf more than once, and not with the same values.
    """
    _read(source, piece, out, origin.name, origin.transpose)
    for name, transpose in origin.again:
        other = torch.empty_like(out)
        _read(source, piece, other, name, transpose)
        if not torch.equal(other, out):
            raise TreeError(
                f"{source.name} holds other values in {name} than in {origin.name}, and the model ties them to one "
                f"leaf: leave one out with rename=[({name!r}, None)], or untie the model"
            )


def _read(source: Source, piece: Piece, out: Tensor, name: str, transpose: bool) -> None:
    parts = [(block, out[block.at : block.at + block.numel].view(block.shape)) for block in blocks(piece)]
    if transpose:
        parts = [(Block(block.offset[::-1], block.shape[::-1], 0), part.t()) for block, part in parts]
    if parts:
        source.read(name, parts)


def index_of(block: Block) -> tuple[slice, ...]:
    """The index that picks a block from the whole tensor."""
    return tuple(slice(o, o + n) for o, n in zip(block.offset, block.shape, strict=True))


def _absent(plan: Plan, source: Source, rename: Sequence[RenameLike]) -> list[str]:
    given = apply_rules(rename, source.tensors, source.name)
    return [p for p, leaf in plan.leaves.items() if not any(name in given for name in (p, *leaf.aliases))]


def _misfits(leaf: Leaf, stored: Stored, name: str, transpose: bool, cast: bool) -> list[str]:
    """What is wrong with a tensor that is to become a leaf."""
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
    """Whether values of one dtype may become those of another: if nothing is rounded, or rounding was asked for."""
    if have == want:
        return True
    if not (have.is_floating_point and want.is_floating_point):
        return False
    a, b = torch.finfo(have), torch.finfo(want)
    return cast or (b.eps <= a.eps and b.max >= a.max and b.smallest_normal <= a.smallest_normal)


def _both(old: str, new: str) -> str:
    return old if old == new else f"{new} (as {old})"
