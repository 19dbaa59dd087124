"""The folder of a run's checkpoints: listing it, adding a checkpoint and removing one.

A checkpoint is the folder ``step-00000042``. It is written as ``step-00000042.tmp-<unique>`` and renamed when all of it
is on disk, so it exists completely or not at all; a checkpoint is renamed before it is removed, too. Checkpoints are
ordered by step, not by time. Only one job writes: it holds a lock on the folder, which the kernel releases when the job
ends in any way, so temporary folders that a writer finds belong to dead jobs. Readers cannot take the lock.
"""

import ctypes
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from fshard.checkpoint.manifest import LIMIT, Manifest, empty, foreign, parse
from fshard.checkpoint.when import Retention
from fshard.errors import CheckpointError, DamagedError, lines
from fshard.forks import own
from fshard.reading.files import SHOWN, damaged, file_errors, listed, open_file, printable

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,18})")
LEFT = re.compile(r"step-\d{8,18}\.(tmp|trash)-[0-9a-f]{8}")
LOCK = ".lock"
PATIENCE = 3.0
"""Seconds that a writer waits for the lock: as long as a killed job may take to exit."""


def step_folder(root: str, step: int) -> str:
    """The folder of a step."""
    return os.path.join(root, f"step-{step:08d}")


def list_steps(root: str) -> list[int]:
    """The steps in a folder, in ascending order; none if it does not exist."""
    with file_errors("list", root):
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            return []
    found = (STEP.fullmatch(name) for name in names)
    return sorted({int(match[1]) for match in found if match and match[0] == f"step-{int(match[1]):08d}"})


def choose_steps(root: str, step: int | None) -> list[int]:
    """The step, or the newest one for None, and all older ones, newest first."""
    steps = list_steps(root)
    if not steps:
        raise empty(root)
    if step is not None and step not in steps:
        have = ", ".join(map(str, steps[-SHOWN:]))
        raise CheckpointError(f"{root} holds no step {step}; it holds {have}: give one of them, or None for the newest")
    return [s for s in reversed(steps) if step is None or s <= step]


def read_manifest(folder: str) -> Manifest:
    """The manifest of a step's folder; raises as ``parse``, also if it is missing or of another step."""
    path = os.path.join(folder, MANIFEST)
    if os.path.islink(folder):
        raise damaged(folder, ["it is a symbolic link, which a checkpoint never is"])
    with open_file(folder, MANIFEST) as file:
        if file.size > LIMIT:
            raise damaged(path, [f"it has {file.size} bytes, and a manifest has at most {LIMIT}"])
        text = file.text(0, file.size)
    manifest = parse(path, text)
    match = STEP.fullmatch(os.path.basename(folder.rstrip(os.sep)))
    if match and int(match[1]) != manifest.step:
        raise damaged(path, [f"it is of step {manifest.step}"])
    return manifest


class CheckpointFolder:
    """The one writer of a folder: it holds the lock from its first save until it is closed."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.lock: int | None = None
        self.run, self.forked = "", ""
        own(self)

    def disown(self, why: str) -> None:
        """Close the descriptor of the lock, which the parent holds by one of its own."""
        self.close()
        self.forked = why

    def begin(self, step: int, overwrite: bool, known: Collection[str] | None = None) -> str:
        """Make the temporary folder of a step and return its path. The first call takes the lock and cleans up.

        ``known`` are the runs that the writer continues: the first call finds which of them the folder's checkpoints
        belong to, and sets ``run``; an empty folder begins a new run. None writes for no run.
        """
        if self.forked:
            raise CheckpointError(f"{self.root} cannot be written to: {self.forked}")
        with file_errors("write to", self.root):
            if os.path.exists(self.root) and not os.path.isdir(self.root):
                raise foreign(self.root, "it is a file")
            os.makedirs(self.root, exist_ok=True)
            if self.lock is None:
                self._take_lock()
            if known is not None and not self.run:
                try:
                    self.run = self._find_run(known)
                except BaseException:
                    self.close()  # other writers may use the folder
                    raise
            final = step_folder(self.root, step)
            if os.path.lexists(final) and not overwrite:
                raise CheckpointError(
                    f"{final} exists already: step {step} was saved before. Pass overwrite=True to replace it, or give "
                    f"this run a folder of its own"
                )
            path = f"{final}.tmp-{secrets.token_hex(4)}"
            os.mkdir(path)
        return path

    def commit(self, path: str, step: int, manifest: bytes) -> None:
        """Write the manifest into a temporary folder and rename it; an older checkpoint of the step is removed."""
        final = step_folder(self.root, step)
        with file_errors("write to", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(os.path.join(path, MANIFEST), flags, 0o644)
            with os.fdopen(fd, "wb") as file:
                file.write(manifest)
                file.flush()
                os.fsync(fd)
            sync(path)
            replaced = os.path.lexists(final)
            if replaced and not swap(path, final):
                # Without an atomic swap the step does not exist for a moment.
                _to_trash(final)
            if not replaced or not os.path.lexists(final):
                os.rename(path, final)
            sync(self.root)
            if replaced:
                self._remove_leftovers(f"{os.path.basename(final)}.")

    def remove_old(self, retention: Retention, step: int) -> None:
        """Remove the steps that are not kept, but never the one just written."""
        old = retention.removable(list_steps(self.root), step)
        with file_errors("remove old steps from", self.root):
            for path in [_to_trash(step_folder(self.root, s)) for s in old]:
                remove(path)

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock, self.run = None, ""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules may be gone by then
        if self.lock is not None:
            close(self.lock)

    def _find_run(self, known: Collection[str]) -> str:
        """The known run that the checkpoints belong to, or a new one for an empty folder. The lock is held."""
        found: dict[str, int] = {}
        for step in reversed(list_steps(self.root)):
            with suppress(DamagedError):  # no run can resume from it
                run = read_manifest(step_folder(self.root, step)).run_id
                if run in known:
                    return run
                found.setdefault(run, step)
        if found:
            rows = [f"run {run}, its newest step is {step}" for run, step in found.items()]
            remedy = (
                "Its steps and those of this run would mix. Restore from the folder to go on with its run, or give "
                "this run a folder of its own. Nothing was written."
            )
            raise CheckpointError(lines(f"{self.root} holds the checkpoints of another run:", listed(rows), remedy))
        return secrets.token_hex(8)

    def _take_lock(self) -> None:
        path = os.path.join(self.root, LOCK)
        # Whoever can open the file can hold the lock, so only its owner may open it. Older locks were open to all.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise foreign(
                    path, f"it is not a plain file with one name; its mode is {stat.filemode(status.st_mode)}"
                )
            if status.st_uid == os.geteuid():
                os.fchmod(fd, 0o600)
            deadline = time.monotonic() + PATIENCE
            while not _lock(fd):
                if time.monotonic() > deadline:
                    holder = printable(os.pread(fd, 200, 0).decode(errors="replace").strip())
                    raise CheckpointError(
                        f"{self.root} is being written to by another Checkpointer ({holder or 'which left no name'}): "
                        f"give each job a folder of its own, or close() the other one. fuser and lslocks show the "
                        f"process that holds {path}"
                    )
                time.sleep(0.05)
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self.lock = fd
        self._remove_leftovers("step-")

    def _remove_leftovers(self, start: str) -> None:
        """Remove temporary folders of this writer and of dead ones: there are no others while this one has the lock."""
        for name in os.listdir(self.root):
            if name.startswith(start) and LEFT.fullmatch(name):
                remove(os.path.join(self.root, name))


def _to_trash(final: str) -> str:
    """Rename a checkpoint so that it no longer exists; returns the new name."""
    path = f"{final}.trash-{secrets.token_hex(4)}"
    os.rename(final, path)
    return path


def _lock(fd: int) -> bool:
    """Try to take the lock; returns whether it was free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def swap(one: str, other: str) -> bool:
    """Swap two names atomically; returns whether the system could (Linux' ``renameat2``; not on NFS)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def remove(path: str) -> None:
    """Remove a folder or a file. Links in it are removed, never followed."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def discard(path: str) -> None:
    """Remove the folder of a failed save; if that fails, the next writer removes it."""
    with suppress(OSError):
        remove(path)


def sync(folder: str) -> None:
    """Write a folder's names to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
