"""Building a schedule: one rule that turns a program into ops.

The compute ops of the step stand first: per microbatch ``forward root``, the forward calls, the backward
calls, ``backward root``; and the code between passes. Everything else is placed around them. Before compute k:
all-gather what the computes k to k+prefetch read and is not there, each pending update ahead of its group's first
all-gather; wait for what k reads. Groups that are not gathered are updated together, before the first compute. After
compute k: free what it read, unless the next window reads it again; and let the gradients that it completed begin
their paths. Updates beside compute begin ``prefetch`` computes earlier, and are waited for before the gather, or the
first reader.

Code between passes is a compute op that reads no gathered group. What it makes is requested after it, and the gradients
that it reads are waited for right before it.

``paths.py`` walks the paths. A value of an edge is sent right after the compute op that completes it; the oldest
message on its edge is waited for then, where more would be under way than the edge allows. It is received before the
first op that reads it: the receive is posted one portion ahead, so that it travels while this rank computes another
microbatch. Two rules that were found by measurement are about updates of which each rank makes a part: they come first
of all (``Updates.partial_first``), and an all-gather that waits for those of other ranks runs one compute ahead at most
(``_updates_under_way``).
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import replace

from fshard.schedule.activation_moves import ActivationWalk
from fshard.schedule.ops import LOCAL, GroupInfo, Op, Program
from fshard.schedule.paths import Paths, Updates
from fshard.schedule.policy import Policy
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_program import Local, Pass, StepProgram

Message = tuple[int, int]
"""The group of an edge, and the microbatch."""


class EdgeWalk:
    """Emits the sends and receives of a step's edges; without edges it emits nothing."""

    def __init__(self, bare: Schedule, ops: list[Op]) -> None:
        self.groups, self.ops = bare.groups, ops
        self.posts: dict[int, list[Message]] = defaultdict(list)  # by the portion during which they travel
        self.waits: dict[int, list[Message]] = defaultdict(list)  # by the compute op that reads them
        self.sends: dict[int, list[Message]] = defaultdict(list)  # by the compute op that completes them
        self.starts: dict[int, int] = {}  # the portion that begins at a compute op
        self.most: dict[int, int] = {}  # messages under way at most, by group
        self.under_way: dict[int, deque[int]] = defaultdict(deque)  # their microbatches, the oldest first
        start = microbatch = 0
        for stage in bare.stages.stages:
            if isinstance(stage, Pass):
                self._place(stage, start, microbatch)
                start, microbatch = start + len(stage.sequence), microbatch + stage.accumulate
            else:
                start += 1

    def first(self) -> None:
        """Post what the first portion receives."""
        self._post(-1)

    def before(self, k: int) -> None:
        """Compute ``k`` is next: wait for what it reads, and post what the next portion reads."""
        for message in self.waits.get(k, ()):
            self._emit("wait receive", message)
        if k in self.starts:
            self._post(self.starts[k])

    def after(self, k: int) -> None:
        """Compute ``k`` is over: send what it has completed."""
        for group, microbatch in self.sends.get(k, ()):
            while len(self.under_way[group]) >= self.most[group]:
                self._sent(group)
            self._emit("send", (group, microbatch))
            self.under_way[group].append(microbatch)

    def finish(self) -> None:
        """The step ends: wait for what is under way."""
        for group, messages in self.under_way.items():
            while messages:
                self._sent(group)

    def _place(self, each: Pass, start: int, microbatch: int) -> None:
        """Write down when the edges of a pass are used."""
        at, begun = start, len(self.starts)
        for number, part in enumerate(each.portions if each.edges else ()):
            self.starts[at] = begun + number
            for group, op, most in each.edges:
                self.most[group] = most
                if not part.first <= op < part.end:
                    continue
                place, message = at + op - part.first, (group, microbatch + part.microbatch)
                if self.groups[group].transfer("send") is not None:
                    self.sends[place].append(message)
                else:
                    self.waits[place].append(message)
                    self.posts[begun + number - 1].append(message)
            at += part.end - part.first

    def _post(self, portion: int) -> None:
        for message in self.posts.get(portion, ()):
            self._emit("receive", message)

    def _sent(self, group: int) -> None:
        """Wait for the oldest message."""
        self._emit("wait send", (group, self.under_way[group].popleft()))

    def _emit(self, kind: str, message: Message) -> None:
        group, microbatch = message
        self.ops.append(Op(kind, self.groups[group].name, 0, microbatch))


def build(
    program: Program | StepProgram, groups: Sequence[GroupInfo], policy: Policy, accumulate: int = 1, train: bool = True
) -> Schedule:
    """The schedule of one step.

    Args:
        program: what the loss function does, or the stages of a step function. Backwards are left out where ``train``
            is False.
        groups: the groups, by id. Trainable groups without a reader are updated too, and reduced as zeros.
        policy: how far to run ahead, and what to keep.
        accumulate: microbatches in the step; 1 for stages, whose passes have their own.
        train: False for a schedule of forward only: no update, no path of a gradient, no consensus. ``backward root``
            is kept: it marks the end of the code outside of units, whose groups are live until then.

    Returns:
        The schedule, a function of the arguments alone. Time and size are linear in the program's reads.

    >>> from fshard.schedule import Call, Transfer
    >>> path = Transfer("all_gather", "state", "param"), Transfer("reduce_scatter", "grad", "shard")
    >>> program = Program((Call("layer"),), (Call("layer"),), {"layer": (0,)})
    >>> for op in build(program, [GroupInfo("layer", 64, 32, 64, True, path)], Policy()):
    ...     print(op)
    handshake
    update layer
    all_gather layer
    forward root
    wait all_gather layer
    forward layer
    backward layer
    free layer
    reduce_scatter layer
    backward root
    wait reduce_scatter layer
    consensus
    """
    if not train:
        program = program.forward_only() if isinstance(program, StepProgram) else replace(program, backward=())
    bare = Schedule((), tuple(groups), program, policy, accumulate, train)
    return replace(bare, ops=tuple(_Builder(bare).run(bare, train)))


class Builds:
    """Schedules whose ops are built once for all groups that move alike: the sizes of what moves change no op.

    A search over meshes has the same ops on most of them.
    """

    def __init__(self) -> None:
        self.ops: dict[Hashable, tuple[Op, ...]] = {}

    def build(
        self, program: Program | StepProgram, groups: Sequence[GroupInfo], policy: Policy, accumulate: int, train: bool
    ) -> Schedule:
        """The schedule of one step, as ``build`` makes it."""
        key = program, policy, accumulate, train, tuple([_form(group) for group in groups])
        ops = self.ops.get(key)
        if ops is not None and train:
            return Schedule(ops, tuple(groups), program, policy, accumulate, train)
        made = build(program, groups, policy, accumulate, train)
        self.ops[key] = made.ops
        return made


def _form(group: GroupInfo) -> Hashable:
    """All that ops depend on of a group: its name, and which transfers it has, and which of them send nothing."""
    return group.name, group.trainable, tuple([(move.kind, move.sent > 0) for move in group.transfers])


class _Builder:
    """The ops so far, and which groups are there."""

    def __init__(self, bare: Schedule) -> None:
        self.groups, self.policy, self.stages = bare.groups, bare.policy, bare.stages
        self.computes = bare.stages.steps
        self.reads = _reads(bare.stages)
        self.uses: list[list[int]] = [[] for _ in self.groups]
        for k, reads in enumerate(self.reads):
            for g in reads:
                self.uses[g].append(k)
        self.passed = [0] * len(self.groups)  # how many of its uses lie behind
        self.kept = self.policy.kept(bare.stages)
        self.horizons = self.policy.horizons(bare.stages)
        self.edge = 0  # computes before it have been asked for
        self.read = [next(iter(group.at("read")), None) for group in self.groups]
        # "", "coming" or "live"; "unmade", and "asked" if it was asked for too
        self.state = [""] * len(self.groups)
        for g in [g for local in bare.stages.locals for g in local.makes]:
            self.state[g] = "unmade"
        self.ops = [Op("handshake")]
        self.updates = Updates(bare, self.ops)
        self.paths = Paths(bare, self.updates, self.ops)

    def run(self, bare: Schedule, train: bool) -> list[Op]:
        """All ops."""
        self.updates.partial_first(sorted(range(len(self.uses)), key=lambda g: (not self.uses[g], self.uses[g][:1])))
        for g, uses in enumerate(self.uses):
            if not uses and self.read[g]:
                self.updates.first(g)
        edges, activations = EdgeWalk(bare, self.ops), ActivationWalk(bare, self.ops)
        edges.first()
        for k, op in enumerate(self.computes):
            self._before(k, op)
            edges.before(k)
            activations.before(k)
            self.ops.append(op)
            activations.after(k)
            edges.after(k)
            self._after(k, op)
        edges.finish()
        self.paths.finish()
        self.updates.finish()
        if train:
            self.ops.append(Op("consensus"))
        return self.ops

    def _emit(self, kind: str, group: int) -> None:
        self.ops.append(Op(kind, self.groups[group].name))

    def _before(self, k: int, op: Op) -> None:
        # What the window held one compute ago is still there, since nothing was freed that it reads: only its
        # new end has to be asked for.
        while self.edge <= min(k + self.policy.prefetch, len(self.computes) - 1):
            reads = self.reads[self.edge]
            if self.edge > k + 1 and self._updates_under_way(reads):
                break
            self.updates.up_to(self.edge, self.reads)
            for g in reads:
                self._request(g)
            self.edge += 1
        self.updates.up_to(k + 2 * self.policy.prefetch, self.reads)
        if k == 0:
            # Together, so that one kernel call can do them all, and behind the first gathers, which hide them.
            for g, read in enumerate(self.read):
                if read is None and self.updates.beside:
                    if not self.uses[g]:
                        self.updates.ahead(g)
                elif read is None:
                    self.updates.first(g)
        for g in self.reads[k]:
            self.updates.first(g)
            self.updates.share(g)
            read = self.read[g]
            if self.state[g] == "coming" and read is not None:
                self._emit(read.row.wait, g)
                self.state[g] = "live"
        self.paths.before(k)
        if op.kind == LOCAL:
            self._before_local(self.stages.locals[op.index])

    def _before_local(self, local: Local) -> None:
        for g in local.updated:
            self.updates.first(g)
            self.updates.share(g)
        self.paths.complete(local.gradients)

    def _after(self, k: int, op: Op) -> None:
        for g in self.reads[k]:
            self.passed[g] += 1
            if self.state[g] == "live" and not self._reused(g, self.horizons[k + 1]):
                self._release(g)
        self.paths.after(k, op.microbatch)
        if op.kind == LOCAL:
            self._after_local(self.stages.locals[op.index])

    def _after_local(self, local: Local) -> None:
        asked = [g for g in local.makes if self.state[g] == "asked"]
        for g in local.makes:
            self.state[g] = ""
        for g in sorted(asked, key=lambda g: self.uses[g]):
            self._request(g)

    def _release(self, group: int) -> None:
        """Free a group; or keep a part of it, which the next gather takes."""
        again = self.groups[group].transfer("regather")
        later = again is not None and self.passed[group] < len(self.uses[group])
        self._emit("reshard" if later else "free", group)
        self.state[group] = ""
        if later:
            self.read[group] = again

    def _reused(self, group: int, horizon: int) -> bool:
        uses, passed = self.uses[group], self.passed[group]
        return passed < len(uses) and (group in self.kept or uses[passed] <= horizon)

    def _request(self, group: int) -> None:
        read = self.read[group]
        if read is not None and not self.state[group]:
            self.updates.first(group)
            self.updates.share(group)
            self._emit(read.kind, group)
            self.state[group] = "coming"
        elif self.state[group] == "unmade":
            self.state[group] = "asked"

    def _updates_under_way(self, reads: Sequence[int]) -> bool:
        """Tell whether an all-gather must still wait for other ranks' updates.

        It then runs one compute ahead at most. Further ahead, compute would wait for what a later unit reads.
        """
        return any([g in self.updates.sharing and self.read[g] is not None for g in reads])


def _reads(stages: StepProgram) -> list[tuple[int, ...]]:
    """Return what each compute op of a step reads."""
    reads: list[tuple[int, ...]] = []
    for stage in stages.stages:
        if isinstance(stage, Local):
            reads.append(())
        else:
            once = [stage.program.needs(op) for op in stage.program.computes]
            reads += [once[at] for _, at in stage.sequence]
    return reads
