"""The knowledge of a check that runs a schedule's ops: of transfers, gradients, groups and parts of the step.

It is made from what a step does and from its groups. Nothing of it comes from ``build``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fshard.schedule.ops import ROOT, GroupInfo, Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Local, Pass
from fshard.schedule.transfers import Transfer


@dataclass
class Progress:
    """The progress of one transfer of a group."""

    transfer: Transfer
    before: "Progress | None"  # the one before it in its path
    limited: bool  # it counts among those under way: one that sends nothing before another is over at once
    started: int = 0  # times
    over: int = 0
    at: int = -1  # the op that started it last

    @property
    def under_way(self) -> bool:
        """Tell whether it was started and not waited for."""
        return self.started > self.over


@dataclass(frozen=True)
class Fill:
    """Passes that fill the gradient of one group.

    Args:
        gradient: the name of the group.
        completes: the position of the last op that fills it, among the compute ops of the step, by microbatch.
        first: the first microbatch of the pass that fills it.
        last: the last one.
    """

    gradient: str
    completes: Mapping[int, int]
    first: int
    last: int


NEVER = Fill("", {}, 0, 0)
"""Of a group without a gradient."""


@dataclass
class GroupProgress:
    """The progress of one group."""

    info: GroupInfo
    kept: bool
    updates: bool  # it has an update in this step
    fill: Fill = NEVER
    made: tuple[int, int] = (-1, -1)  # position of the local that makes it, and which one that is
    uses: list[int] = field(default_factory=list)  # positions, among the compute ops, of those that read it
    readers: list[str] = field(default_factory=list)  # groups whose pending update reads its gradient
    passed: int = 0
    slot: str = "free"  # or "coming", "live"
    second: bool = False  # this rank keeps a part of it
    gathered_at: int = -1
    update: str = ""  # or "under way", "over"
    path: Sequence[Progress] = ()  # of its gradient
    shares: Sequence[Progress] = ()  # after its update
    progress: Mapping[str, Progress] = field(default_factory=dict)  # both, by kind

    @property
    def next_use(self) -> int | None:
        """Position of the next compute op that reads it."""
        return self.uses[self.passed] if self.passed < len(self.uses) else None

    @property
    def shared(self) -> bool:
        """Tell whether what other ranks updated of it is there."""
        return all([progress.over for progress in self.shares])


@dataclass(frozen=True)
class PartProgress:
    """A portion of a microbatch of a pass, or the code between two passes.

    Args:
        start: the position of its first op among the compute ops of the step.
        end: that of the op behind its last one.
        microbatch: its number; of a local, that of the microbatch before.
        reads: names of the groups that each unit reads.
        fills: what its backward fills, by the name of the group that is read.
        local: the code between passes.
        parted: whether its backwards are in two parts; ``"taped"`` if the second reads no parameters.
    """

    start: int
    end: int
    microbatch: int
    reads: Mapping[str, Sequence[str]]
    fills: Mapping[str, Fill]
    local: Local | None = None
    parted: bool | Literal["taped"] = False

    def needs(self, op: Op) -> Sequence[str]:
        """The names of the groups that an op reads."""
        return () if op.kind == "weight" and self.parted == "taped" else self.reads.get(op.target, ())

    def filled_by(self, op: Op) -> list[str]:
        """The names of the groups whose gradients an op fills."""
        kind = "weight" if self.parted and op.target != ROOT else "backward"
        return [name for name in self.reads.get(op.target, ()) if op.kind == kind and name in self.fills]


def parts_of(schedule: Schedule) -> list[PartProgress]:
    """The parts of a step, in order."""
    groups, parts = schedule.groups, list[PartProgress]()
    start = microbatch = 0
    for stage in schedule.stages.stages:
        if isinstance(stage, Local):
            parts.append(PartProgress(start, start + 1, max(microbatch - 1, 0), {}, {}, stage))
            start += 1
            continue
        reads = {unit: [groups[i].name for i in ids] for unit, ids in stage.program.reads.items()}
        fills = _fills(stage, groups, microbatch, start)
        for part in stage.portions:
            end = start + part.end - part.first
            parted = stage.program.parted
            parts.append(PartProgress(start, end, microbatch + part.microbatch, reads, fills, None, parted))
            start = end
        microbatch += stage.accumulate
    return parts


def tracks_of(schedule: Schedule, parts: Sequence[PartProgress]) -> dict[str, GroupProgress]:
    """All groups, by name, before the first op."""
    stages, groups, kept = schedule.stages, schedule.groups, schedule.policy.kept(schedule.stages)
    tracks = {info.name: GroupProgress(info, g in kept, g in stages.updates) for g, info in enumerate(groups)}
    for fill in [fill for part in parts for fill in part.fills.values()]:
        tracks[fill.gradient].fill = fill
    _place(schedule, parts, tracks)
    for g, gradient in stages.updates.items():
        if gradient is not None:
            tracks[groups[gradient].name].readers.append(groups[g].name)
    for track in tracks.values():
        track.path = _chain(track.info.at("gradient")) if track.fill is not NEVER else ()
        track.shares = _chain(track.info.at("updated")) if track.updates else ()
        track.progress = {progress.transfer.kind: progress for progress in (*track.path, *track.shares)}
    return tracks


def _place(schedule: Schedule, parts: Sequence[PartProgress], tracks: Mapping[str, GroupProgress]) -> None:
    """Write down where groups are read and made."""
    local = 0
    for part in parts:
        if part.local is not None:
            for g in part.local.makes:
                tracks[schedule.groups[g].name].made = (part.start, local)
            local += 1
            continue
        for at in range(part.start, part.end):
            for name in part.needs(schedule.stages.steps[at]):
                tracks[name].uses.append(at)


def _fills(each: Pass, groups: Sequence[GroupInfo], first: int, start: int) -> dict[str, Fill]:
    """Return what a pass fills, by the name of the group that is read.

    Args:
        each: the pass.
        groups: all groups.
        first: its first microbatch.
        start: the position of its first compute op.
    """
    last = first + each.accumulate - 1
    found = {}
    for read, gradient in (each.gradients or {}).items():
        completes = {first + m: start + each.filled[m, read][1] for m in range(each.accumulate)}
        found[groups[read].name] = Fill(groups[gradient].name, completes, first, last)
    return found


def _chain(path: Sequence[Transfer]) -> list[Progress]:
    """A path before its first transfer."""
    chain: list[Progress] = []
    for number, transfer in enumerate(path):
        limited = transfer.sent > 0 or number + 1 == len(path)
        chain.append(Progress(transfer, chain[-1] if chain else None, limited))
    return chain
