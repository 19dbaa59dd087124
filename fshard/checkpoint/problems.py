"""Errors of checkpoints: one builder per failure, each with path, numbers and remedy."""

import errno
from collections.abc import Iterable, Mapping, Sequence

from fshard.errors import CheckpointError, DamagedError, TreeError, lines

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
    return CheckpointError(f"{path} is no checkpoint of fshard: {what}. Give the folder that fs.Checkpointer wrote to.")


def unusable(path: str, problems: Iterable[str]) -> DamagedError:
    """A damaged file of another library."""
    return DamagedError(lines(f"{path} cannot be used:", listed(list(problems)), "Fetch it or write it again."))


def unreachable(path: str, doing: str, error: OSError) -> CheckpointError:
    """An error of the file system. A disk that fails to read a file has damaged it."""
    if error.errno == errno.EIO and doing == "read":
        return damaged(path, [f"the disk cannot read it: {error.strerror}"])
    reasons = {
        "ENOSPC": "free space, or lower keep=",
        "EDQUOT": "free space, or lower keep=",
        "EACCES": "change its permissions, or use another folder",
        "EPERM": "change its permissions, or use another folder",
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


def no_such_step(path: str, step: int, steps: Sequence[int]) -> CheckpointError:
    """A step that does not exist."""
    have = ", ".join(map(str, steps[-SHOWN:])) or "none"
    return CheckpointError(f"{path} holds no step {step}; it holds {have}: give one of them, or None for the newest")


def exists(path: str, step: int) -> CheckpointError:
    """A step that exists already."""
    return CheckpointError(
        f"{path} exists already: step {step} was saved before. Pass overwrite=True to replace it, or give this run "
        f"a folder of its own"
    )


def another_run(path: str, found: Mapping[str, int]) -> CheckpointError:
    """A run that tries to save beside the checkpoints of another run."""
    rows = [f"run {run}, its newest step is {step}" for run, step in found.items()]
    remedy = (
        "Its steps and those of this run would mix. Restore from the folder to go on with its run, or give this run a "
        "folder of its own. Nothing was written."
    )
    return CheckpointError(lines(f"{path} holds the checkpoints of another run:", listed(rows), remedy))


def other_folder(rank: int, path: str, first: str, name: str) -> CheckpointError:
    """A rank that sees another folder than rank 0."""
    return CheckpointError(
        f"rank {rank}: its folder {path} holds no {name}, which is in rank 0's folder {first}: give all ranks one "
        f"folder, on a file system that all of them see"
    )


def other_checkpoints(step: int, rows: Sequence[str]) -> CheckpointError:
    """Ranks that read different checkpoints of one step."""
    head = f"ranks read different checkpoints of step {step}:"
    return CheckpointError(lines(head, rows, "Give all ranks one folder, on a file system that all of them see."))


def locked(path: str, holder: str) -> CheckpointError:
    """A folder that another job writes to."""
    return CheckpointError(
        f"{path} is being written to by another Checkpointer ({holder or 'which left no name'}): give each job a "
        f"folder of its own, or close() the other one. fuser and lslocks show the process that holds {path}/.lock"
    )


def mismatched(path: str, problems: Sequence[str], counts: str) -> TreeError:
    """A checkpoint whose leaves do not fit a plan."""
    remedy = (
        "Restore with the model and optimizer that it was saved with, pass cast=True for other dtypes, or select what "
        "to read with rules=."
    )
    return TreeError(lines(f"{path} does not fit the plan ({counts}):", problems, remedy))
