"""The entries that a state has before and after a move, of which ranks of a pipeline know those of their stages."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fshard.collectives.linear import Collect, apply
from fshard.collectives.ranks import Ranks
from fshard.sharding.mesh import Mesh
from fshard.state.pieces import Entry

DTYPES = tuple(sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str))
"""All dtypes, in an order that ranks have in common."""


@dataclass(frozen=True)
class Known:
    """The entries before and after a move, by name, on any rank. One that this rank lacks is described by another.

    Attributes:
        old: those before.
        new: those after.
    """

    old: Mapping[str, Entry]
    new: Mapping[str, Entry]

    @functools.cached_property
    def common(self) -> dict[str, None]:
        """The names of entries that have values before and after, in the order of all ranks."""
        return {name: None for name in self.new if name in self.old and alike(self.old[name], self.new[name])}

    def ndim(self, name: str) -> int:
        """The number of dims of an entry."""
        return len(self.old[name].shape)


def alike(old: Entry, new: Entry) -> bool:
    """Tell whether a tensor can be read from another: in rows, of which there may be other numbers, or of one shape."""
    return old.shape[bool(new.rows) :] == new.shape[bool(new.rows) :]


def known_entries(mesh: Mesh, old: Mapping[str, Entry], new: Mapping[str, Entry], stages: tuple[bool, bool]) -> Known:
    """The entries of a move, to a plan with stages, or from one, or neither. Collective where there are stages.

    Args:
        mesh: all ranks.
        old: the entries of this rank before the move.
        new: those after.
        stages: whether the plan before has stages, and whether that after has some.
    """
    if not any(stages):
        return Known(old, new)
    before = stages[0]
    every, some = (new, old) if before else (old, new)
    rows = []
    for name in every:
        mine = some.get(name)
        rows += [-1, 0] if mine is None else [DTYPES.index(mine.dtype), mine.shape[0] if mine.rows else 0]
    row = torch.tensor(rows, dtype=torch.int64, device=mesh.device)
    most = apply(row, Collect(Ranks(mesh, mesh.axis_names), -1)).view(mesh.size, -1, 2).amax(0).tolist()
    known = dict[str, Entry]()
    for (name, entry), (dtype, count) in zip(every.items(), most, strict=True):
        if dtype >= 0:
            shape = (count, *entry.shape[1:]) if entry.rows else entry.shape
            described = replace(entry, shape=shape, tensor=torch.empty(0, dtype=DTYPES[dtype], device="cpu"))
            known[name] = some.get(name, described)
    known |= {name: entry for name, entry in some.items() if name not in known}
    return Known(known, new) if before else Known(old, known)
