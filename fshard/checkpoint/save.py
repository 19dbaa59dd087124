"""One save: from each rank's slices to a complete checkpoint under its final name."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fshard.checkpoint.folder import CheckpointFolder, discard
from fshard.checkpoint.manifest import Extent, Manifest, TensorInfo, inconsistent, read_extent, read_file
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.states import all_entries, all_scalars, one_mesh, step_of, whole_entries
from fshard.checkpoint.tensorfile import DTYPES, NAMES
from fshard.checkpoint.when import Retention
from fshard.checkpoint.write import packed, write_files
from fshard.data.loader import without_position
from fshard.errors import CheckpointError, CommError, lines
from fshard.reading.files import file_errors
from fshard.runtime.comm import Communicator, Facts, all_ranks_or_raise, first_rank_or_raise
from fshard.state.equal import Equal
from fshard.state.train_state import TrainState
from fshard.version import VERSION


@dataclass(frozen=True)
class Save:
    """One rank's part of a save: the temporary folder, the manifest without files and extents, and what to write.

    Where a model is cut into stages, ``staged``, each rank knows the tensors of its own.
    """

    rank: int
    path: str
    head: Manifest
    slices: list[Slice]
    staged: bool = False


def head_of(states: Mapping[str, TrainState], user: Mapping[str, Any]) -> Manifest:
    """The manifest of states without files and extents; ``user`` holds data, metadata, schedule and run."""
    found = {entry.name: TensorInfo(entry.shape, entry.dtype, repr(entry.spec), ()) for entry in all_entries(states)}
    versions = {"fshard": VERSION, "torch": str(torch.__version__)}
    names = () if "" in states else tuple(states)
    mesh = dict(one_mesh(states).shape)
    return Manifest(step_of(states), all_scalars(states), found, {}, mesh, versions=versions, states=names, **user)


def save_facts(state: TrainState, user: Mapping[str, Any], options: Mapping[str, Any]) -> Facts:
    """Return what must be equal on all ranks of a save: state, copies, the user's JSON and options."""
    whole = state.plan.whole  # ranks of other stages have other tensors, and other schedules
    tensors = {entry.name: f"{entry.dtype} {list(entry.shape)}" for entry in whole_entries(state) if whole is None}
    own = {name: json.dumps(value) for name, value in user.items() if whole is None or name != "schedule"}
    return Equal(whole or state.plan, {**own, **options, "tensor": tensors}, always=True, replicas=True).of(state)


def write_and_commit(comm: Communicator, folder: CheckpointFolder, retention: Retention, save: Save) -> None:
    """Write all ranks' files, commit the checkpoint and remove old steps. Collective; a failure removes the files."""

    def commit(written: list[dict[str, Any]]) -> None:
        manifest = complete(save.head, written)
        folder.commit(save.path, manifest.step, manifest.dump())
        folder.remove_old(retention, manifest.step)

    try:
        written = all_ranks_or_raise(comm, lambda: _write(save))
        first_rank_or_raise(comm, save.rank, lambda: commit(written))
    except BaseException as error:
        remove_failed(comm, save.rank, save.path, error)
        raise


def remove_failed(comm: Communicator, rank: int, path: str, error: BaseException) -> None:
    """Remove a failed save's files before any rank goes on. Collective, unless communication has failed."""
    if not isinstance(error, CommError):
        first_rank_or_raise(comm, rank, lambda: discard(path))
    elif rank == 0:
        discard(path)


def _write(save: Save) -> dict[str, Any]:
    with file_errors("write to", save.path):
        written = write_files(save.path, save.rank, packed(save.slices))
    if save.staged:
        known = save.head.tensors.items()
        written["tensors"] = {name: [NAMES[info.dtype], info.shape, info.spec] for name, info in known}
    return written


def complete(head: Manifest, written: Sequence[Mapping[str, Any]]) -> Manifest:
    """The manifest of all ranks' files, as from ``write_files``, which must hold every element of the state once."""
    files = {name: read_file(name, row) for rank in written for name, row in rank["files"].items()}
    known = {**head.tensors}
    for rank in written:
        for name, (dtype, shape, spec) in rank.get("tensors", {}).items():
            known.setdefault(name, TensorInfo(tuple(shape), DTYPES[dtype], spec, ()))
    extents: dict[str, list[Extent]] = {name: [] for name in known}
    for rank in written:
        for name, rows in rank["extents"].items():
            extents[name] += [read_extent(number, row) for number, row in enumerate(rows)]
    tensors = {name: replace(info, extents=tuple(extents[name])) for name, info in known.items()}
    manifest = replace(head, files=files, tensors=tensors)
    problems = list(inconsistent(manifest))
    if problems:
        remedy = "Ranks hold other parts than the plan says: make their states from one plan. Nothing was saved."
        raise CheckpointError(lines(f"the parts of step {head.step} do not make up the state:", problems[:20], remedy))
    return manifest


def check_json(name: str, value: Any) -> None:
    """Refuse a value that JSON does not return unchanged."""
    if problem := without_position(value):
        raise CheckpointError(f"{name}=: {problem}")
    try:
        back = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{name}= cannot be written as JSON: {error}; give dicts, lists, strings and finite numbers"
        ) from error
    if repr(back) != repr(value):
        raise CheckpointError(
            f"{name}= does not come back from JSON as it was: {str(value)[:200]} became {str(back)[:200]}; give lists "
            f"in place of tuples, and strings as keys"
        )
