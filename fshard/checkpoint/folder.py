"""The folder of a run's checkpoints: what is in it, and how a checkpoint comes into it and goes from it.

A checkpoint is the folder ``step-00000042``. It is written as ``step-00000042.tmp-<unique>`` and renamed when all of it
is on disk, so it exists whole or not at all; one that goes is renamed first, too. Checkpoints are ordered by step, not
by time. Only one job writes: it holds a lock on the folder, which the kernel takes back when the job ends in any way;
so what a writer finds under a temporary name is of a job that is dead. Who may only read the folder cannot hold it.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from fshard.checkpoint.files import folder_at, plain_file
from fshard.checkpoint.manifest import LIMIT, Manifest, parse
from fshard.checkpoint.problems import (
    another_run,
    damaged,
    empty,
    exists,
    foreign,
    locked,
    no_such_step,
    printable,
    unreachable,
)
from fshard.errors import DamagedError

MANIFEST = "manifest.json"
STEP = re.compile(r"step-(\d{8,18})")
LEFT = re.compile(r"step-\d{8,18}\.(tmp|trash)-[0-9a-f]{8}")
LOCK = ".lock"
PATIENCE = 3.0
"""Seconds that a writer waits for the lock: as long as a job that was killed may take to be gone."""


@contextmanager
def telling(doing: str, path: str) -> Iterator[None]:
    """The file system's errors as errors that say what to do."""
    try:
        yield
    except OSError as error:
        raise unreachable(str(error.filename or path), doing, error) from error


def step_folder(root: str, step: int) -> str:
    """The folder of a step."""
    return os.path.join(root, f"step-{step:08d}")


def list_steps(root: str) -> list[int]:
    """The steps that a folder holds, in order; none if it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    with telling("list", root):
        try:
            names = os.listdir(root)
        except FileNotFoundError:
            return []
    found = (STEP.fullmatch(name) for name in names)
    return sorted({int(match[1]) for match in found if match and match[0] == f"step-{int(match[1]):08d}"})


def choose_steps(root: str, step: int | None) -> list[int]:
    """The step, or the newest one for None, and all that are older, newest first.

    Raises:
        CheckpointError: there is none, or not this one.
    """
    steps = list_steps(root)
    if not steps:
        raise empty(root)
    if step is not None and step not in steps:
        raise no_such_step(root, step, steps)
    return [s for s in reversed(steps) if step is None or s <= step]


def read_manifest(folder: str) -> Manifest:
    """The manifest of a step's folder.

    Raises:
        CheckpointError: it cannot be read, or is of a newer format.
        DamagedError: it is missing, or not as it was written.
    """
    path = os.path.join(folder, MANIFEST)
    with telling("read", path):
        if os.path.islink(folder):
            raise damaged(folder, ["it is a symbolic link, which a checkpoint never is"])
        with folder_at(folder) as at, plain_file(folder, MANIFEST, at) as file:
            if file.size > LIMIT:
                raise damaged(path, [f"it has {file.size} bytes, and a manifest has at most {LIMIT}"])
            text = file.text(0, file.size)
    manifest = parse(path, text)
    match = STEP.fullmatch(os.path.basename(folder.rstrip(os.sep)))
    if match and int(match[1]) != manifest.step:
        raise damaged(path, [f"it is of step {manifest.step}"])
    return manifest


class Folder:
    """The one writer of a folder: it holds the lock from its first save until it is closed."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.lock: int | None = None
        self.run: str | None = None

    def begin(self, step: int, overwrite: bool, known: Collection[str] | None = None) -> str:
        """Make the temporary folder of a step; returns its path. The first call takes the lock and clears up.

        Args:
            step: which one.
            overwrite: whether it may be there already.
            known: the runs that the writer goes on with. The first call finds which of them the folder's checkpoints
                belong to, and notes it as ``run``; an empty folder begins a new one. None writes for no run.

        Raises:
            CheckpointError: the step is there already, another job writes here, the folder is that of another run, or
                the file system says no.
        """
        with telling("write to", self.root):
            if os.path.exists(self.root) and not os.path.isdir(self.root):
                raise foreign(self.root, "it is a file")
            os.makedirs(self.root, exist_ok=True)
            if self.lock is None:
                self._take_lock()
            if known is not None and self.run is None:
                try:
                    self.run = self._find_run(known)
                except BaseException:
                    self.close()  # the folder is for others
                    raise
            final = step_folder(self.root, step)
            if os.path.lexists(final) and not overwrite:
                raise exists(final, step)
            path = f"{final}.tmp-{secrets.token_hex(4)}"
            os.mkdir(path)
        return path

    def commit(self, path: str, step: int, manifest: bytes) -> None:
        """Write the manifest into a temporary folder and give it its name; a step of that name goes.

        Raises:
            CheckpointError: the file system says no.
        """
        final = step_folder(self.root, step)
        with telling("write to", path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(os.path.join(path, MANIFEST), flags, 0o644)
            with os.fdopen(fd, "wb") as file:
                file.write(manifest)
                file.flush()
                os.fsync(fd)
            sync(path)
            replaced = os.path.lexists(final)
            if replaced and not swap(path, final):
                # Where names cannot be swapped there is a moment without this step.
                self._aside(final)
            if not replaced or not os.path.lexists(final):
                os.rename(path, final)
            sync(self.root)
            if replaced:
                self._clear(f"{os.path.basename(final)}.")

    def retain(self, keep: int | None, step: int) -> list[int]:
        """Remove the oldest steps until ``keep`` are left; never the one just written. Returns what went.

        Raises:
            CheckpointError: the file system says no.
        """
        others = [s for s in list_steps(self.root) if s != step]
        old = others[: max(0, len(others) - (keep - 1))] if keep is not None else []
        with telling("remove old steps from", self.root):
            for path in [self._aside(step_folder(self.root, s)) for s in old]:
                remove(path)
        return old

    def close(self) -> None:
        """Give the lock back."""
        if self.lock is not None:
            os.close(self.lock)
            self.lock = self.run = None

    def __del__(self) -> None:
        self.close()

    def _find_run(self, known: Collection[str]) -> str:
        """Which of these runs the checkpoints here belong to; a new one if there are none. The lock is held.

        Raises:
            CheckpointError: they belong to others.
        """
        found: dict[str, int] = {}
        for step in reversed(list_steps(self.root)):
            with suppress(DamagedError):  # nobody can go on from it
                run = read_manifest(step_folder(self.root, step)).run_id
                if run in known:
                    return run
                found.setdefault(run, step)
        if found:
            raise another_run(self.root, found)
        return secrets.token_hex(8)

    def _take_lock(self) -> None:
        path = os.path.join(self.root, LOCK)
        # Who can open it can hold it, and a reader shall not: its owner alone may. Older locks could be opened by all.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
                raise foreign(path, f"it is no plain file of its own, but has the mode {stat.filemode(status.st_mode)}")
            if status.st_uid == os.geteuid():
                os.fchmod(fd, 0o600)
            deadline = time.monotonic() + PATIENCE
            while not _locked(fd):
                if time.monotonic() > deadline:
                    raise locked(self.root, printable(os.pread(fd, 200, 0).decode(errors="replace").strip()))
                time.sleep(0.05)
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        self.lock = fd
        self._clear("step-")

    def _clear(self, start: str) -> None:
        """Remove what writers left behind: this one, and those that are dead, since this one has the lock."""
        for name in os.listdir(self.root):
            if name.startswith(start) and LEFT.fullmatch(name):
                remove(os.path.join(self.root, name))

    def _aside(self, final: str) -> str:
        """Take a checkpoint's name away from it; returns the new one."""
        path = f"{final}.trash-{secrets.token_hex(4)}"
        os.rename(final, path)
        return path


def _locked(fd: int) -> bool:
    """Whether the lock could be taken."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def swap(one: str, other: str) -> bool:
    """Swap two names at once, where the system can (Linux' ``renameat2``; not on NFS)."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def remove(path: str) -> None:
    """Remove a folder, or what else has its name. Links in it are removed, never followed."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def discard(path: str) -> None:
    """Remove what a failed save leaves; the next writer does, where this one cannot."""
    with suppress(OSError):
        remove(path)


def sync(folder: str) -> None:
    """Names of a folder to disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
