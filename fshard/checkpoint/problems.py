"""Errors of checkpoints: one builder per failure, each with path, numbers and remedy."""

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


def foreign(path: str, what: str) -> CheckpointError:
    """A file or folder that fshard did not write."""
    return CheckpointError(
        f"{path} is not a checkpoint of fshard: {what}. Give the folder that fs.Checkpointer wrote to."
    )


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


def empty(path: str) -> CheckpointError:
    """A folder without checkpoints."""
    return CheckpointError(
        f"{path} holds no checkpoint: check the path, or start with fs.init_state(plan, opt) where latest() is None"
    )


def other_folder(rank: int, path: str, first: str, name: str) -> CheckpointError:
    """A rank that sees another folder than rank 0."""
    return CheckpointError(
        f"rank {rank}: its folder {path} holds no {name}, which is in rank 0's folder {first}: give all ranks one "
        f"folder, on a file system that all of them see"
    )
