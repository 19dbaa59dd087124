"""Checkpoints without processes: all ranks of an abstract mesh, one after the other."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import tree
from fshard.checkpoint.folder import CheckpointFolder, read_manifest, step_folder
from fshard.checkpoint.manifest import Manifest
from fshard.checkpoint.read import read_into
from fshard.checkpoint.restore import RestoreRequest, prepare
from fshard.checkpoint.save import complete, head_of
from fshard.checkpoint.write import owned, packed, write_files
from fshard.state.entries import entries
from fshard.state.pieces import Entry
from fshard.state.train_state import TrainState

NOTHING: dict[str, Any] = {"data": None, "metadata": None, "schedule": None}


def meshes(sizes: Sequence[int], names: Sequence[str]) -> list[fs.Mesh]:
    """An abstract mesh as each of its ranks sees it."""
    return [fs.abstract_mesh(sizes, names, rank=rank) for rank in range(math.prod(sizes))]


def states(params: Any, rules: Any, sizes: Sequence[int], opt: Any, batch: fs.P | None = None) -> list[TrainState]:
    """A state as each rank of an abstract mesh holds it; the optimizer's is made of values of its own."""
    out = []
    for mesh in meshes(sizes, ("data", "tensor")):
        plan = fs.make_plan(params, mesh, rules, batch=batch or fs.P("data"))
        state = fs.init_state(plan, opt, seed=3, params=params)
        for entry in entries(state):
            if entry.name.startswith("opt."):
                whole = values(entry.name, entry.shape, entry.dtype)
                entry.tensor.copy_(taken(whole, entry))
        out.append(state)
    return out


def values(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The whole value of an entry, from its name alone."""
    draw = torch.Generator().manual_seed(sum(map(ord, name)))
    if dtype == torch.bool:
        return torch.rand(list(shape), generator=draw) > 0.5
    return (torch.rand(list(shape), generator=draw) * 200 - 60).to(dtype)


def taken(whole: Tensor, entry: Entry) -> Tensor:
    """A rank's part of it."""
    piece = entry.piece
    box = whole[tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.shape, strict=True))]
    return box.reshape(-1)[piece.start : piece.stop]


def save_all(root: str, ranks: Sequence[TrainState], limit: int = 1 << 29, user: Any = None) -> Manifest:
    """What the ranks of a job do in a save, without the exchange."""
    folder = CheckpointFolder(str(root))
    path = folder.begin(ranks[0].step, False)
    rows = [write_files(path, rank, packed(owned(entries(s), rank), limit)) for rank, s in enumerate(ranks)]
    manifest = complete(head_of({"": ranks[0]}, user or NOTHING), rows)
    folder.commit(path, ranks[0].step, manifest.dump())
    folder.close()
    return manifest


def restore_all(root: str, plans: Sequence[fs.Plan], opt: Any, step: int = 0, **request: Any) -> list[TrainState]:
    """What the ranks of a job do in a restore."""
    folder, out = step_folder(str(root), step), []
    for plan in plans:
        manifest = read_manifest(folder)
        state, wants = prepare(folder, manifest, RestoreRequest(plan, opt, **request))
        read_into(folder, manifest, wants)
        out.append(state)
    return out


def whole_params(flat: dict[str, tuple[Sequence[int], torch.dtype]]) -> dict[str, Any]:
    """A tree of values made from their names."""
    return tree.nest({path: values(f"params.{path}", shape, dtype) for path, (shape, dtype) in flat.items()})
