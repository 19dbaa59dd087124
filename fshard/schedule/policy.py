"""The numbers that a schedule is built from."""

from dataclasses import dataclass

from fshard import errors

UPDATES = ("deferred", "in_backward")


@dataclass(frozen=True)
class Policy:
    """How far a schedule runs ahead, and what it keeps: memory against time.

    Args:
        prefetch: compute calls ahead of the running one whose groups may already be gathered. 0 gathers each
            group just before it is read, with nothing to hide behind.
        reduces: gradient reductions in flight at most, at least 1. Each keeps a full flat gradient alive.
        reshard: free a group after its forward and gather it again for its backward (ZeRO-3, FSDP's reshard
            after forward). False keeps each group from its first use in the step to its last.
        update: ``"deferred"`` leaves the optimizer update to the next step, which applies it group by group
            before its gathers: the step is atomic and global clipping exact. ``"in_backward"`` applies it as
            soon as a group's last gradient is reduced: nothing waits, and no step can be undone.

    Raises:
        PlanError: a value is of another type or out of range; all of them are listed.

    >>> Policy(prefetch=2)
    Policy(prefetch=2, reduces=2, reshard=True, update='deferred')
    """

    prefetch: int = 1
    reduces: int = 2
    reshard: bool = True
    update: str = "deferred"

    def __post_init__(self) -> None:
        problems = []
        for name, least in (("prefetch", 0), ("reduces", 1)):
            value = getattr(self, name)
            if type(value) is not int:
                problems.append(f"{name}={value!r} is of type {type(value).__name__}, not int")
            elif value < least:
                problems.append(f"{name}={value} is less than {least}")
        if type(self.reshard) is not bool:
            problems.append(f"reshard={self.reshard!r} is of type {type(self.reshard).__name__}, not bool")
        if self.update not in UPDATES:
            problems.append(f"update={self.update!r} is none of {', '.join(map(repr, UPDATES))}")
        if problems:
            raise errors.bad_policy(problems)

    def __str__(self) -> str:
        return (
            f"prefetch={self.prefetch} reduces={self.reduces} reshard={str(self.reshard).lower()} update={self.update}"
        )
