"""States of replicas that train apart (``fs.outer``), as one state of all ranks: what a checkpoint holds.

What each replica has for itself, its parameters and its optimizer's state, is a tensor with one dim more, of which each
replica holds a row. What replicas hold equal copies of, such as the anchor, is as it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fshard.sharding.layout import Piece
from fshard.sharding.mesh import Mesh
from fshard.sharding.part import PartMesh
from fshard.sharding.spec import P, Shape
from fshard.state.pieces import Entry

PARAMS, ANCHOR, DELTA = "params.", "opt.anchor.", "opt.delta."
"""How the names of entries begin: parameters, what all replicas started from, and what replicas have yet to tell."""


def of_all_replicas(entries: Iterable[Entry], mesh: Mesh) -> list[Entry]:
    """Entries of one replica, as parts of those of all; other entries as they are."""
    return [_lifted(entry, mesh) for entry in entries] if isinstance(mesh, PartMesh) else [*entries]


def with_replicas(entries: list[Entry], mesh: Mesh, saved: Mapping[str, Shape]) -> list[Entry]:
    """These entries with as many replicas as tensors by these names have.

    A tensor that has the shape of the entry but for the number of replicas fits: ``saved_at`` says what is read of it.
    """
    return [_resized(entry, saved.get(entry.name, ())) for entry in entries] if isinstance(mesh, PartMesh) else entries


def saved_at(entry: Entry, name: str, mesh: Mesh) -> tuple[str, Piece] | None:
    """The tensor and the piece of it that an entry is read from; None for what keeps its first value.

    A replica that the checkpoint does not have, such as one that comes back to a run which went on without it, starts
    from the anchor. The state of its optimizer is that of a replica that was saved, and it has nothing left to tell.

    Args:
        entry: as ``with_replicas`` returned it.
        name: of the tensor that has it.
        mesh: of the plan.
    """
    if not isinstance(mesh, PartMesh) or entry.common or mesh.replica < entry.shape[0]:
        return name, entry.piece
    if entry.name.startswith(DELTA):
        return None
    if entry.name.startswith(PARAMS):
        piece = replace(entry.piece, offset=entry.piece.offset[1:], shape=entry.piece.shape[1:])
        return name.replace(PARAMS, ANCHOR, 1), piece
    return name, replace(entry.piece, offset=(mesh.replica % entry.shape[0], *entry.piece.offset[1:]))


def _lifted(entry: Entry, mesh: PartMesh) -> Entry:
    if entry.common:
        return replace(entry, holders=mesh.everyone(entry.holders))
    piece = replace(entry.piece, offset=(mesh.replica, *entry.piece.offset), shape=(1, *entry.piece.shape))
    holders = tuple(mesh.members[rank] for rank in entry.holders)
    spec = P(mesh.over, *entry.spec.dims, flat=entry.spec.flat)
    return replace(entry, shape=(mesh.replicas, *entry.shape), piece=piece, holders=holders, spec=spec)


def _resized(entry: Entry, saved: Shape) -> Entry:
    fits = not entry.common and saved[1:] == entry.shape[1:] and len(saved) == len(entry.shape)
    return replace(entry, shape=saved) if fits else entry
