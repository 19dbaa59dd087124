"""One save: from a copy of each rank's slices in host memory to a complete checkpoint under its final name."""

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fshard.checkpoint.folder import CheckpointFolder, discard
from fshard.checkpoint.manifest import Extent, Manifest, TensorInfo, inconsistent, read_extent, read_file
from fshard.checkpoint.ranges import Slice
from fshard.checkpoint.states import all_entries, all_scalars, one_mesh, step_of, whole_entries
from fshard.checkpoint.tensorfile import DTYPES, NAMES
from fshard.checkpoint.when import Retention
from fshard.checkpoint.write import chunked, packed, write_files
from fshard.data.loader import without_position
from fshard.errors import CheckpointError, CommError, lines
from fshard.reading.files import file_errors
from fshard.runtime.comm import Communicator, Facts, all_ranks_or_raise, first_rank_or_raise
from fshard.runtime.comm.device_streams import Event, copy_stream, events
from fshard.state.equal import Equal
from fshard.state.train_state import TrainState
from fshard.torch_internals import foreach_copy_
from fshard.version import VERSION

ALIGN = 64
"""Bytes to which slices are aligned in a snapshot."""

CHUNK, CHUNKS = 32 << 20, 4
"""Bytes of a page-locked chunk, and their number: one is filled while others are emptied."""

Pair = tuple[Tensor, Tensor]
"""A target in host memory, and what is copied to it: bytes, 1-D."""


class Snapshot:
    """Host memory for a copy of this rank's slices, reused by every save: allocating new pages is slower than copying.

    What lies in host memory is copied at once. What lies on a GPU is copied by ``finish``, which two threads call: the
    one that writes, at once, and that of a step that is about to overwrite the state. One copies, the other waits.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.staging: Staging | None = None
        self.left: list[Pair] = []
        self.after: tuple[Event, ...] = ()
        self.lock = threading.Lock()

    def take(self, slices: Sequence[Slice]) -> list[Slice]:
        """Slices of the copy, which are valid until the next call, and complete after ``finish``."""
        starts, end = [], 0
        for s in slices:
            starts.append(end)
            end += -(-s.nbytes // ALIGN) * ALIGN
        if len(self.memory) < end:
            self.memory = self.memory.new_empty(0)  # free the old memory first
            self.memory = self.memory.new_empty(end)
        rows = [self.memory[a : a + s.nbytes] for a, s in zip(starts, slices, strict=True)]
        pairs = [(row, s.data.detach().view(torch.uint8)) for row, s in zip(rows, slices, strict=True)]
        for row, given in pairs:
            if given.device.type == "cpu":
                row.copy_(given)
        self.left = [pair for pair in pairs if pair[1].device.type != "cpu"]
        if self.left:
            device = self.left[0][1].device
            self.staging = self.staging or Staging(device)
            self.after = events(device)
        return [replace(s, data=row.view(s.data.dtype)) for s, row in zip(slices, rows, strict=True)]

    def finish(self) -> None:
        """Return when the copy is complete, and what was copied may be overwritten."""
        with self.lock:
            if self.left and self.staging is not None:
                self.staging.copy(self.left, self.after)
                self.left = []


class Staging:
    """A few chunks of page-locked memory, through which bytes of a device reach host memory of any size.

    Args:
        device: the device. Copies from it for checkpoints have a stream of their own.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream, pinned = copy_stream(device, "snapshots"), device.type == "cuda"
        self.chunks = [torch.empty(CHUNK, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(CHUNKS)]

    def copy(self, pairs: Sequence[Pair], after: Sequence[Event]) -> None:
        """Copy, beginning after the events. Returns when all has arrived."""
        flying: deque[Arriving] = deque()
        rows, given = chunked([row for row, _ in pairs], CHUNK), chunked([data for _, data in pairs], CHUNK)
        for to, of, chunk in zip(rows, given, cycle(self.chunks), strict=False):
            if len(flying) == CHUNKS:
                flying.popleft().land()
            flying.append(self._start(to, of, chunk, after))
        for one in flying:
            one.land()

    def _start(self, rows: list[Tensor], given: list[Tensor], chunk: Tensor, after: Sequence[Event]) -> "Arriving":
        parts = list(torch.split(chunk[: sum(map(len, rows))], [len(row) for row in rows]))
        with self.stream.after(after):
            foreach_copy_(parts, given, non_blocking=True)
            return Arriving(parts, rows, self.stream.record())


@dataclass(frozen=True)
class Arriving:
    """Bytes on their way to a chunk, and where they belong."""

    parts: list[Tensor]
    rows: list[Tensor]
    over: Event | None

    def land(self) -> None:
        """Wait until they are in the chunk, and copy them from there."""
        if self.over is not None:
            self.over.synchronize()
        foreach_copy_(self.rows, self.parts)


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
