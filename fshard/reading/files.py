"""The one reader of untrusted files: all files of checkpoints and models are opened and read here.

Only regular files are opened: opening a pipe waits for a writer, and opening a device may have effects. The size is
known before anything is read, reads stay inside of it, and memory is allocated by what exists, never by what a file
claims. A file that shrinks while it is read raises an error; reading a memory map would end the process by a signal.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fshard.errors import CheckpointError, DamagedError, ShardError, lines

SHOWN = 20
"""Problems that a message lists; it counts the others."""


def listed(problems: Sequence[str]) -> list[str]:
    """The first problems, and how many more there are."""
    more = len(problems) - SHOWN
    return [*map(printable, problems[:SHOWN]), *([f"... and {more} more"] if more > 0 else [])]


def printable(text: str, most: int = 400) -> str:
    r"""An untrusted text for a message: of bounded length and without control characters.

    >>> print(printable("a" + chr(27) + "[2J"))
    a\x1b[2J
    """
    part = text[:most] + ("..." if len(text) > most else "")
    return part if part.isprintable() else part.encode("unicode_escape").decode("ascii")


def damaged(path: str, problems: Iterable[str]) -> DamagedError:
    """Bytes on disk differ from what was written."""
    remedy = "Restore another step (fallback=True takes the newest good one), or copy the checkpoint again."
    return DamagedError(lines(f"{path} is damaged, or was changed:", listed(list(problems)), remedy))


def unusable(path: str, problems: Iterable[str]) -> DamagedError:
    """A damaged file of another library."""
    return DamagedError(lines(f"{path} cannot be used:", listed(list(problems)), "Fetch it or write it again."))


def unreachable(path: str, doing: str, error: OSError) -> CheckpointError:
    """An error of the file system. A disk that fails to read a file has damaged it."""
    if error.errno == errno.EIO and doing == "read":
        return damaged(path, [f"the disk cannot read it: {error.strerror}"])
    space, permissions = "free space, or lower keep=", "change its permissions, or use another folder"
    reasons = {
        "ENOSPC": space,
        "EDQUOT": space,
        "EACCES": permissions,
        "EPERM": permissions,
        "EROFS": "use a folder that can be written to",
        "ENOENT": "check the path; something else may have removed it",
        "ENOTDIR": "check the path",
        "ELOOP": "it is a symbolic link, which a checkpoint never contains: copy what it points to",
    }
    name = errno.errorcode.get(error.errno or 0, "")
    remedy = reasons.get(name, "check the file system and try again")
    return CheckpointError(f"cannot {doing} {path}: {error.strerror or error} ({name}); {remedy}")


Refusal = Callable[[str, Iterable[str]], ShardError]
"""Makes the error for a file from its path and the problems."""

STRIDE = 1 << 20
"""Bytes of a text that are read at a time."""

SMALL, THIN = 16 << 20, 64
"""A file larger than ``SMALL`` bytes with less than one in ``THIN`` on disk consists almost only of holes."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link, which a checkpoint never contains",
}
"""Names of file types that are not regular files."""


@dataclass(frozen=True)
class File:
    """An open regular file: path for errors, descriptor, bytes when it was opened, and the error for a problem."""

    path: str
    number: int
    size: int
    refuse: Refusal

    def fill(self, view: memoryview, begin: int) -> None:
        """Fill a view with the bytes from ``begin`` on."""
        done = 0
        while done < len(view):
            count = os.preadv(self.number, [view[done:]], begin + done)
            if not count:
                break
            done += count
        if done < len(view):
            raise self.refuse(self.path, [f"it ends before byte {begin + len(view)} of its {self.size} bytes"])

    def read(self, begin: int, end: int) -> bytearray:
        """The bytes ``begin`` to ``end``. Memory is allocated only if they lie in the file."""
        if not 0 <= begin <= end <= self.size:
            raise self.refuse(self.path, [f"it has {self.size} bytes, and bytes {begin} to {end} were requested"])
        data = bytearray(end - begin)
        self.fill(memoryview(data), begin)
        return data

    def text(self, begin: int, end: int) -> bytes:
        """The bytes ``begin`` to ``end`` of a text. Holes read as NUL bytes, which are refused before more is read."""
        parts = []
        for at in range(begin, end, STRIDE):
            part = bytes(self.read(at, min(end, at + STRIDE)))
            if b"\0" in part:
                where = at + part.index(b"\0")
                raise self.refuse(self.path, [f"it is not text: its byte {where} is 0, as in a hole"])
            parts.append(part)
        return b"".join(parts)

    def check_dense(self) -> None:
        """Refuse a large file that consists almost only of holes, before memory is allocated by its size."""
        held = os.fstat(self.number).st_blocks * 512
        if self.size > SMALL and held < self.size // THIN:
            problem = f"{held} of its {self.size} bytes are on disk, and the rest are holes"
            remedy = "restore it into a plan, whose size bounds the memory, or copy it to a disk that stores zeros"
            raise self.refuse(self.path, [f"{problem}: {remedy}"])


@contextmanager
def file_errors(doing: str, path: str) -> Iterator[None]:
    """Turn errors of the file system into CheckpointErrors that say what to do."""
    try:
        yield
    except OSError as error:
        raise unreachable(str(error.filename or path), doing, error) from error


@contextmanager
def folder_at(path: str, *, links: bool = False) -> Iterator[int]:
    """An open folder; a symbolic link to one is refused unless ``links``."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    try:
        yield number
    finally:
        os.close(number)


@contextmanager
def plain_file(
    folder: str, name: str, at: int, size: int | None = None, *, links: bool = False, refuse: Refusal = damaged
) -> Iterator[File]:
    """An open regular file of the open folder ``at``, of ``size`` bytes if given; links are refused unless ``links``.

    Raises:
        CheckpointError: the file is missing, has another size, or is not a regular file.
        OSError: any other error of the file system.
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
        raise OSError(error.errno, error.strerror, path) from None  # the system gives the name without the folder
    try:
        status = os.fstat(number)
        _check_kind(path, status, refuse)  # again: the name may have changed its meaning meanwhile
        if size is not None and status.st_size != size:
            raise refuse(path, [f"it is a plain file of {status.st_size} bytes, and the manifest says {size}"])
        yield File(path, number, status.st_size, refuse)
    finally:
        os.close(number)


@contextmanager
def open_file(
    folder: str,
    name: str,
    size: int | None = None,
    *,
    links: bool = False,
    folder_link: bool = False,
    refuse: Refusal = damaged,
) -> Iterator[File]:
    """An open regular file as from ``plain_file``, together with its folder, which may be a link if ``folder_link``."""
    with (
        file_errors("read", os.path.join(folder, name)),
        folder_at(folder, links=folder_link) as at,
        plain_file(folder, name, at, size, links=links, refuse=refuse) as file,
    ):
        yield file


def _check_kind(path: str, status: os.stat_result, refuse: Refusal) -> None:
    kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    if not stat.S_ISREG(status.st_mode):
        raise refuse(path, [f"it is not a plain file, but {kind}"])


def is_plain_name(name: str) -> bool:
    """Tell whether a name can only mean a file in its own folder."""
    try:
        text = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return name not in ("", ".", "..") and b"/" not in text and b"\0" not in text
