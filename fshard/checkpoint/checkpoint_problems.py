"""Errors of checkpoints: one builder per failure, each with path, numbers and remedy."""

from fshard.errors import CheckpointError


def foreign(path: str, what: str) -> CheckpointError:
    """A file or folder that fshard did not write."""
    return CheckpointError(
        f"{path} is not a checkpoint of fshard: {what}. Give the folder that fs.Checkpointer wrote to."
    )


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
