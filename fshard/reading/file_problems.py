"""Errors of files that are read: one builder per failure, each with path, numbers and remedy."""

import errno
from collections.abc import Iterable, Sequence

from fshard.errors import CheckpointError, DamagedError, lines

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
