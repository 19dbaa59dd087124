"""What makes a schedule of several passes right, as statements about the positions of ops.

They are those of ``statements``, said of passes, of the code between them, and of gradients that are not their group's
own. They share no code with ``fshard.schedule``.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from fshard.schedule import Op, Schedule
from fshard.schedule.step_program import Local, Pass
from tests.schedule.cases import kept_groups, sends


@dataclass(frozen=True)
class Beat:
    """One compute op of a step: its stage, and what it reads."""

    op: Op
    stage: int
    reads: tuple[int, ...] = ()
    readable: tuple[int, ...] = ()  # what code outside of units may read besides


def beats(schedule: Schedule) -> list[Beat]:
    """The compute ops of a step, in order."""
    found, microbatch, local = list[Beat](), 0, 0
    for number, stage in enumerate(schedule.stages.stages):
        if isinstance(stage, Local):
            found.append(Beat(Op("local", "", local), number))
            local += 1
            continue
        made = stage.program
        for _ in range(stage.accumulate):
            once = [("forward", "root", 0), *(("forward", c.unit, c.index) for c in made.forward)]
            once += [*(("backward", c.unit, c.index) for c in made.backward), ("backward", "root", 0)]
            for kind, unit, index in once:
                op = Op(kind, unit, index, microbatch)
                found.append(Beat(op, number, made.reads[unit], made.reads["root"]))
            microbatch += 1
    return found


def valid(schedule: Schedule) -> bool:
    """Whether every statement about positions holds."""
    return all(_Statements(schedule).all())


class _Statements:
    def __init__(self, schedule: Schedule) -> None:
        self.s, self.beats = schedule, beats(schedule)
        self.computes = [i for i, op in enumerate(schedule.ops) if op.kind in ("forward", "backward", "local")]
        self.locals = [stage for stage in schedule.stages.stages if isinstance(stage, Local)]
        self.filler: dict[int, tuple[int, int]] = {}  # the stage that fills a gradient, and through which group
        for number, stage in enumerate(schedule.stages.stages):
            for read, gradient in ((stage.gradients or {}) if isinstance(stage, Pass) else {}).items():
                self.filler[gradient] = number, read

    def all(self) -> Iterator[bool]:
        """Every statement."""
        s = self.s
        yield [s.ops[i] for i in self.computes] == [beat.op for beat in self.beats]
        yield [i for i, op in enumerate(s.ops) if op.kind == "handshake"] == [0]
        yield [i for i, op in enumerate(s.ops) if op.kind == "consensus"] == [len(s.ops) - 1]
        if [s.ops[i] for i in self.computes] != [beat.op for beat in self.beats]:
            return
        names = {group.name for group in s.groups}
        for op in s.ops:
            computes, step = op.kind in ("forward", "backward", "local"), op.kind in ("handshake", "consensus")
            yield computes or op.target in (("",) if step else names)
            yield not op.index or computes
            yield not op.microbatch or op.kind in ("forward", "backward", "reduce_scatter", "wait reduce_scatter")
        yield from self.limits()
        for g, group in enumerate(s.groups):
            mine = [(i, op) for i, op in enumerate(s.ops) if op.target == group.name and i not in self.computes]
            yield from self.slots(g, [(i, op.kind) for i, op in mine])
            yield from self.gradient(g, mine)
            yield from self.update(g, mine)
            yield from self.fills(g, mine)

    def limits(self) -> Iterator[bool]:
        """How much is under way."""
        flights = sums = 0
        sending = {g.name for g in self.s.groups if sends(g, "reduce_scatter") or not sends(g, "replica_reduce")}
        for op in self.s.ops:
            flights += ((op.kind == "reduce_scatter") - (op.kind == "wait reduce_scatter")) * (op.target in sending)
            sums += (op.kind == "replica_reduce") - (op.kind == "wait replica_reduce")
            yield flights <= self.s.policy.reduces
            yield sums <= self.s.policy.reduces + 1

    def horizon(self, k: int) -> int:
        """The last compute whose groups may stay while compute k runs."""
        calls = [i for i, beat in enumerate(self.beats) if beat.op.target not in ("root", "")]
        ahead = self.s.policy.prefetch

        def differ(a: int, b: int) -> bool:
            return (self.beats[a].op.kind, self.beats[a].stage) != (self.beats[b].op.kind, self.beats[b].stage)

        turns = [(a, b) for a, b in pairwise(calls) if differ(a, b)]
        return max([k, *(b for a, b in turns if a - ahead < k <= b)]) + ahead

    def users(self, g: int) -> list[int]:
        """Compute ops that read a group."""
        return [i for i, beat in zip(self.computes, self.beats, strict=True) if g in beat.reads]

    def readers(self, g: int) -> list[int]:
        """Compute ops at which it must be readable."""
        both = zip(self.computes, self.beats, strict=True)
        return [i for i, beat in both if g in beat.reads or g in beat.readable]

    def slots(self, g: int, mine: list[tuple[int, str]]) -> Iterator[bool]:
        """All-gathers and frees."""
        s, users = self.s, self.users(g)
        turns = [(i, kind) for i, kind in mine if kind in ("all_gather", "wait all_gather", "free")]
        yield re.fullmatch("(all_gather wait all_gather free )*", "".join(f"{kind} " for _, kind in turns)) is not None
        yield s.groups[g].gathered or not turns
        spans = [(turns[k][0], turns[k + 1][0], turns[k + 2][0]) for k in range(0, len(turns) - 2, 3)]
        if s.groups[g].gathered:
            for user in self.readers(g):
                yield any(wait < user < free for _, wait, free in spans)
        programs = [stage.program for stage in s.stages.stages if isinstance(stage, Pass)]
        kept = any(g in kept_groups(program, s.policy) for program in programs)
        yield not kept or len(spans) <= 1
        makers = [self.at(Op("local", "", n)) for n, local in enumerate(self.locals) if g in local.makes]
        for gather, _, free in spans:
            yield all(maker < gather for maker in makers)
            ahead = [user for user in users if user > gather]
            yield bool(ahead) and sum(gather < i < ahead[0] for i in self.computes) <= s.policy.prefetch
            for k, i in enumerate(self.computes):
                if gather < i < free and not kept:
                    yield any(j in users for j in self.computes[k : self.horizon(k) + 1])

    def read_at(self, places: list[int]) -> set[int]:
        """What these compute ops read."""
        return {g for i, beat in zip(self.computes, self.beats, strict=True) if i in places for g in beat.reads}

    def at(self, op: Op) -> int:
        """Where a compute op stands."""
        return self.computes[[beat.op for beat in self.beats].index(op)]

    def filling(self, g: int) -> list[int]:
        """Compute ops that fill a gradient: if none does, the end of each microbatch of its pass stands for them."""
        stage, read = self.filler[g]
        mine = [(i, b) for i, b in zip(self.computes, self.beats, strict=True) if b.stage == stage]
        fills = [i for i, beat in mine if beat.op.kind == "backward" and read in beat.reads]
        return fills or [i for i, beat in mine if (beat.op.kind, beat.op.target) == ("backward", "root")]

    def gradient(self, g: int, mine: list[tuple[int, Op]]) -> Iterator[bool]:
        """Reductions."""
        s, group = self.s, self.s.groups[g]
        turns = [(i, op) for i, op in mine if op.kind in ("reduce_scatter", "wait reduce_scatter")]
        sums = [(i, op.kind) for i, op in mine if op.kind in ("replica_reduce", "wait replica_reduce")]
        due = g in self.filler and group.reduced
        filling = self.filling(g) if due else []
        rounds = sorted({s.ops[i].microbatch for i in filling})[-1 if s.policy.accumulation == "full" else 0 :]
        yield [(op.kind, op.microbatch) for _, op in turns] == [
            (kind, m) for m in rounds for kind in ("reduce_scatter", "wait reduce_scatter")
        ]
        yield [kind for _, kind in sums] == ["replica_reduce", "wait replica_reduce"] * (
            due and sends(group, "replica_reduce") > 0
        )
        yield not sums or not turns or turns[-1][0] < sums[0][0]
        for i, op in turns:
            if op.kind == "reduce_scatter":
                before = [j for j in self.computes if j < i]
                yield bool(before) and s.ops[before[-1]].kind != "local"
                yield bool(before) and s.ops[before[-1]].microbatch == op.microbatch
                yield all(j < i for j in filling if s.ops[j].microbatch == op.microbatch)
            else:
                again = [j for j in filling if s.ops[j].microbatch == op.microbatch + 1]
                yield self.filler[g][1] not in self.read_at(again) or all(i < j for j in again)
        for n, local in enumerate(self.locals):
            if g in local.gradients:
                yield all(i < self.at(Op("local", "", n)) for i, _ in (*turns, *sums))

    def update(self, g: int, mine: list[tuple[int, Op]]) -> Iterator[bool]:
        """Updates, and what they send."""
        updates = [i for i, op in mine if op.kind == "update"]
        sent = [(i, op.kind) for i, op in mine if op.kind in ("update_gather", "wait update_gather")]
        pending = g in self.s.stages.updates
        yield len(updates) == pending
        yield [kind for _, kind in sent] == ["update_gather", "wait update_gather"] * (
            pending and sends(self.s.groups[g], "update_gather") > 0
        )
        users = [i for i, op in mine if op.kind == "all_gather"] + self.readers(g)
        users += [self.at(Op("local", "", n)) for n, local in enumerate(self.locals) if g in local.updated]
        if updates and pending:
            yield all(updates[0] < i for i in (*users, *(i for i, _ in sent)))
            yield all(i < user for i, _ in sent for user in users)

    def fills(self, g: int, mine: list[tuple[int, Op]]) -> Iterator[bool]:
        """A gradient is replaced after the updates that read it."""
        if g not in self.filler:
            return
        stage, read = self.filler[g]
        both = zip(self.computes, self.beats, strict=True)
        own = [i for i, b in both if b.stage == stage and b.op.kind == "backward" and read in b.reads]
        own += [i for i, op in mine if op.kind in ("reduce_scatter", "replica_reduce")]
        for other, gradient in self.s.stages.updates.items():
            if gradient == g:
                name = self.s.groups[other].name
                updates = [i for i, op in enumerate(self.s.ops) if op.kind == "update" and op.target == name]
                yield all(i < j for i in updates for j in own)
