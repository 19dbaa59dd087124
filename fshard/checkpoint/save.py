"""One save, from the slices of each rank to a checkpoint that has its name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fshard.checkpoint.folder import Folder, discard, telling
from fshard.checkpoint.manifest import Extent, FileInfo, Manifest, extent_row, inconsistent, read_extent
from fshard.checkpoint.meeting import Meeting, only_first
from fshard.checkpoint.write import Slice, Written, described, write_files
from fshard.errors import CheckpointError, CommError, lines
from fshard.runtime.equal import Facts
from fshard.state.entries import entries, scalars
from fshard.state.equal import Equal
from fshard.state.train_state import TrainState
from fshard.version import VERSION


@dataclass(frozen=True)
class Saving:
    """A save under way.

    Attributes:
        path: the temporary folder.
        head: the manifest, still without files and extents.
        slices: what this rank writes.
    """

    path: str
    head: Manifest
    slices: list[Slice] = field(default_factory=list)


def head_of(state: TrainState, user: Mapping[str, Any]) -> Manifest:
    """What the manifest of a state says before anything is written; ``user`` has data, metadata, schedule and run."""
    held = entries(state)
    mesh = state.plan.mesh
    versions = {"fshard": VERSION, "torch": str(torch.__version__)}
    return Manifest(state.step, scalars(state), described(held), {}, dict(mesh.shape), versions=versions, **user)


def save_facts(state: TrainState, user: Mapping[str, Any], options: Mapping[str, Any]) -> Facts:
    """What must be equal on all ranks of a save: state, copies, the user's own JSON, and options."""
    tensors = {entry.name: f"{entry.dtype} {list(entry.shape)}" for entry in entries(state)}
    own = {name: json.dumps(value) for name, value in user.items()}
    return Equal(state.plan, {**own, **options, "tensor": tensors}, always=True).of(state)


def perform(meeting: Meeting, folder: Folder, keep: int | None, saving: Saving) -> None:
    """Write, meet, commit, and remove old steps. Collective.

    Raises:
        CheckpointError: it failed on a rank; on all ranks alike, and the temporary folder is gone.
    """
    try:
        rows = meeting.together(lambda: _write(meeting.rank, saving))

        def commit() -> None:
            manifest = joined(saving.head, rows)
            folder.commit(saving.path, manifest.step, manifest.dump())
            folder.retain(keep, manifest.step)

        meeting.together(only_first(meeting.rank, commit))
    except BaseException as error:
        withdraw(meeting, saving.path, error)
        raise


def withdraw(meeting: Meeting, path: str | None, error: BaseException) -> None:
    """Remove what a failed save made, before any rank goes on. Collective, unless ranks can no longer talk."""

    def body() -> None:
        if meeting.rank == 0 and path is not None:
            discard(path)

    if isinstance(error, CommError):
        body()
    else:
        meeting.together(body)


def _write(rank: int, saving: Saving) -> dict[str, Any]:
    """Write this rank's files; returns them, and their extents, as JSON."""
    with telling("write to", saving.path):
        return as_row(write_files(saving.path, rank, saving.slices))


def as_row(written: Written) -> dict[str, Any]:
    """What was written, as JSON."""
    files = {name: [info.size, info.chunk, list(info.chunks)] for name, info in written.files.items()}
    return {"files": files, "extents": {k: [extent_row(e) for e in rows] for k, rows in written.extents.items()}}


def joined(head: Manifest, rows: list[dict[str, Any]]) -> Manifest:
    """The manifest of what all ranks wrote.

    Raises:
        CheckpointError: it is not the whole state, or not once.
    """
    files: dict[str, FileInfo] = {}
    extents: dict[str, list[Extent]] = {name: [] for name in head.tensors}
    for row in rows:
        files.update(
            (name, FileInfo(size, tuple(chunks), chunk)) for name, (size, chunk, chunks) in row["files"].items()
        )
        for name, found in row["extents"].items():
            extents[name] += [extent for extent in map(read_extent, found) if extent is not None]
    tensors = {name: replace(info, extents=tuple(extents[name])) for name, info in head.tensors.items()}
    manifest = replace(head, files=files, tensors=tensors)
    problems = list(inconsistent(manifest))
    if problems:
        remedy = "Ranks hold other parts than the plan says: make their states from one plan. Nothing was saved."
        raise CheckpointError(lines(f"the parts of step {head.step} do not make up the state:", problems[:20], remedy))
    return manifest


def check_json(what: str, value: Any) -> None:
    """Refuse what does not come back from JSON as it was.

    Raises:
        CheckpointError: it does not.
    """
    try:
        back = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}= cannot be written as JSON: {error}; give dicts, lists, strings and finite numbers"
        ) from error
    if repr(back) != repr(value):
        raise CheckpointError(
            f"{what}= does not come back from JSON as it was: {str(value)[:200]} became {str(back)[:200]}; give lists "
            f"in place of tuples, and strings as keys"
        )
