"""Entries of what replicas have for themselves, as tensors of all ranks: what a checkpoint holds.

A tensor that differs between replicas has one dim more, of which each replica holds a row. Replicas that train apart
(``fs.outer``) have their parameters and their optimizer's state so; what they hold equal copies of, such as the anchor,
is as it is. Replicas that train together have what rounding has left out of their parts of a sum (``Entry.rows``): what
counts is the sum of the rows, so a state with another number of replicas takes all of it up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Mesh
from fshard.sharding.part_mesh import ReplicaMesh
from fshard.sharding.spec import P, Shape, axes_of
from fshard.state.pieces import PARAMS, Entry

ANCHOR, DELTA = "opt.anchor.", "opt.delta."
"""How the names of entries begin: what all replicas started from, and what replicas have yet to tell."""


def of_all_replicas(entries: Iterable[Entry], mesh: Mesh) -> list[Entry]:
    """Entries of one replica, as parts of those of all; other entries as they are."""
    return [_lifted(entry, mesh) for entry in entries] if isinstance(mesh, ReplicaMesh) else [*entries]


def with_replicas(entries: list[Entry], mesh: Mesh, saved: Mapping[str, Shape]) -> list[Entry]:
    """These entries with as many replicas as tensors by these names have.

    A tensor that has the shape of the entry but for the number of replicas fits: ``saved_at`` says what is read of it.
    """
    apart = isinstance(mesh, ReplicaMesh)
    return [_resized(entry, saved.get(entry.name, ())) if apart or entry.rows else entry for entry in entries]


def saved_at(entry: Entry, name: str, mesh: Mesh) -> list[tuple[str, Piece]]:
    """The tensors, each with a piece of it, of which an entry is the sum; none for what keeps its first value.

    Of entries in rows each replica takes up every so many rows as there are replicas now: with fewer of them than were
    saved nothing is lost, and with more the last ones begin with zeros.

    A replica that trains apart and is not in the checkpoint, such as one that comes back to a run which went on without
    it, starts from the anchor. The state of its optimizer is that of a replica that was saved, and it has nothing left
    to tell.

    Args:
        entry: as ``with_replicas`` returned it.
        name: of the tensor that has it.
        mesh: of the plan.
    """
    if entry.rows == "any" and not isinstance(mesh, ReplicaMesh):
        row = entry.piece.offset[0] % entry.shape[0]
        return [(name, replace(entry.piece, offset=(row, *entry.piece.offset[1:])))]
    if entry.rows and not isinstance(mesh, ReplicaMesh):
        rows = range(entry.piece.offset[0], entry.shape[0], mesh.axis_size(axes_of(entry.spec.dims[0])))
        return [(name, replace(entry.piece, offset=(row, *entry.piece.offset[1:]))) for row in rows]
    if not isinstance(mesh, ReplicaMesh) or entry.common or mesh.replica < entry.shape[0]:
        return [(name, entry.piece)]
    if entry.rows or entry.name.startswith(DELTA):
        return []
    if entry.name.startswith(PARAMS):
        piece = replace(entry.piece, offset=entry.piece.offset[1:], shape=entry.piece.shape[1:])
        return [(name.replace(PARAMS, ANCHOR, 1), piece)]
    return [(name, replace(entry.piece, offset=(mesh.replica % entry.shape[0], *entry.piece.offset[1:])))]


def refitted(whole: Tensor, entry: Entry) -> Tensor:
    """A whole tensor in rows with as many rows as an entry has, and the same sum; others as they are."""
    if not entry.rows or whole.shape[0] == entry.shape[0]:
        return whole
    if entry.rows == "any":
        return torch.stack([whole[row % whole.shape[0]] for row in range(entry.shape[0])])
    return torch.stack([whole[row :: entry.shape[0]].sum(0) for row in range(entry.shape[0])])


def _lifted(entry: Entry, mesh: ReplicaMesh) -> Entry:
    if entry.common:
        return replace(entry, holders=mesh.everyone(entry.holders))
    piece = replace(entry.piece, offset=(mesh.replica, *entry.piece.offset), shape=(1, *entry.piece.shape))
    holders = tuple(mesh.members[rank] for rank in entry.holders)
    spec = P(mesh.over, *entry.spec.dims, flat=entry.spec.flat)
    return replace(entry, shape=(mesh.replicas, *entry.shape), piece=piece, holders=holders, spec=spec)


def _resized(entry: Entry, saved: Shape) -> Entry:
    fits = not entry.common and saved[1:] == entry.shape[1:] and len(saved) == len(entry.shape)
    return replace(entry, shape=saved) if fits else entry
