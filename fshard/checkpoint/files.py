"""The one reader: files of a folder that a stranger may have filled are opened and read here, and nowhere else.

A file is opened only if it is a plain one, since opening a pipe waits for a writer, and opening a device may do things.
Its size is known before anything is read, reads lie inside of it, and memory is taken for what is there, never for what
a file says of itself. A file that becomes shorter meanwhile is an error, where a mapped file would be a signal.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fshard.checkpoint.problems import damaged
from fshard.errors import CheckpointError

Refusal = Callable[[str, Iterable[str]], CheckpointError]
"""The error for a file, from its path and what is wrong with it."""

STRIDE = 1 << 20
"""Bytes of a text that are read at once."""

SMALL, THIN = 16 << 20, 64
"""A file over so many bytes, of which not one in so many is on disk, is nearly all holes."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link, which a checkpoint never holds",
}
"""What is no plain file, by the type in its mode."""


@dataclass(frozen=True)
class File:
    """An open plain file.

    Attributes:
        path: where it is, for errors.
        number: its descriptor.
        size: its bytes, when it was opened.
        refuse: the error for what is wrong with it.
    """

    path: str
    number: int
    size: int
    refuse: Refusal

    def fill(self, view: memoryview, begin: int) -> None:
        """Fill a view from a byte on.

        Raises:
            CheckpointError: the file ends before.
        """
        done = 0
        while done < len(view):
            count = os.preadv(self.number, [view[done:]], begin + done)
            if not count:
                break
            done += count
        if done < len(view):
            raise self.refuse(self.path, [f"it ends before byte {begin + len(view)} of its {self.size} bytes"])

    def read(self, begin: int, end: int) -> bytearray:
        """The bytes ``begin`` to ``end``, which must lie in the file: nothing is allocated otherwise.

        Raises:
            CheckpointError: they do not.
        """
        if not 0 <= begin <= end <= self.size:
            raise self.refuse(self.path, [f"it has {self.size} bytes, and bytes {begin} to {end} are wanted of it"])
        data = bytearray(end - begin)
        self.fill(memoryview(data), begin)
        return data

    def text(self, begin: int, end: int) -> bytes:
        """The bytes ``begin`` to ``end`` as those of a text. Holes hold NUL bytes, so no memory is taken for them.

        Raises:
            CheckpointError: a NUL byte is among them, or they do not lie in the file.
        """
        parts = []
        for at in range(begin, end, STRIDE):
            part = bytes(self.read(at, min(end, at + STRIDE)))
            if b"\0" in part:
                where = at + part.index(b"\0")
                raise self.refuse(self.path, [f"it is no text: byte {where} of it is 0, as in a hole"])
            parts.append(part)
        return b"".join(parts)

    def check_dense(self) -> None:
        """Refuse a large file that is nearly all holes, before memory is taken for all that it claims.

        Raises:
            CheckpointError: it is one.
        """
        held = os.fstat(self.number).st_blocks * 512
        if self.size > SMALL and held < self.size // THIN:
            problem = f"{held} of its {self.size} bytes are on disk, and the rest are holes"
            remedy = "restore it into a plan, which takes memory by the plan, or copy it to where zeros are stored"
            raise self.refuse(self.path, [f"{problem}: {remedy}"])


@contextmanager
def folder_at(path: str, *, links: bool = False) -> Iterator[int]:
    """An open folder, for the files in it; unless ``links``, a symbolic link is refused.

    Raises:
        OSError: the file system's own.
    """
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def plain_file(
    folder: str, name: str, at: int, size: int | None = None, *, links: bool = False, refuse: Refusal = damaged
) -> Iterator[File]:
    """An open file of a folder, which must be a plain file, of a known size if one is given.

    Args:
        folder: where it lies, for errors.
        name: what it is called there.
        at: the open folder.
        size: its bytes, if they are known.
        links: whether a symbolic link to a plain file will do.
        refuse: the error for what is wrong with it.

    Raises:
        CheckpointError: it is missing, or something else.
        OSError: the file system's own.
    """
    path = os.path.join(folder, name)
    if not is_plain_name(name):
        raise refuse(folder, [f"{name!r} is not a plain file name"])
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    try:
        _check_kind(path, os.stat(name, dir_fd=at, follow_symlinks=links), refuse)
        number = os.open(name, flags, dir_fd=at)
    except FileNotFoundError:
        raise refuse(path, ["it is missing"]) from None
    except OSError as error:
        error.filename = path  # not as it is called from its folder
        raise
    try:
        status = os.fstat(number)
        _check_kind(path, status, refuse)  # once more: the name may mean something else by now
        if size is not None and status.st_size != size:
            raise refuse(path, [f"it is a plain file of {status.st_size} bytes, and the manifest says {size}"])
        yield File(path, number, status.st_size, refuse)
    finally:
        os.close(number)


def _check_kind(path: str, status: os.stat_result, refuse: Refusal) -> None:
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    if not stat.S_ISREG(status.st_mode):
        raise refuse(path, [f"it is no plain file, but {kind}"])


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in a folder, and leads nowhere else."""
    try:
        text = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and b"/" not in text and b"\0" not in text
