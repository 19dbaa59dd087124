"""Executors: the loop over a schedule's ops, and the one that gathers on demand where no schedule is known yet.

Neither has a policy of its own. A program that leaves the schedule by skipping calls costs nothing but time: their
communication runs all the same, so that every rank issues the schedule's collectives in the schedule's order whatever
its own program does. A call that the schedule does not hold ahead cannot be served so: it raises ``Mispredicted``, the
step is given up on all ranks together, and runs again on demand.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Protocol

from fshard.errors import CommError, ScheduleError
from fshard.runtime.handles import Mispredicted
from fshard.runtime.interrupts import Shield
from fshard.schedule.ops import ROOT, Call, Op, Program
from fshard.schedule.schedule import Schedule

COMPUTE = frozenset(("forward", "backward"))
EAGER = frozenset(("update", "all_gather", "free", "reduce_scatter"))
"""Ops that never wait, so they are issued as soon as the compute op before them is over."""


Positions = Mapping[tuple[str, str, int, int], int]
"""Where each compute op stands in a schedule, by kind, unit, call and microbatch."""


class Actions(Protocol):
    """What the ops of a schedule do."""

    def perform(self, op: Op) -> None:
        """Do one op that is neither a compute op nor an update."""

    def apply(self, groups: Sequence[str]) -> None:
        """Update these groups."""

    def live(self, group: str) -> bool:
        """Whether units can read this group now."""


class Scheduled:
    """Runs the ops of a schedule in its order.

    Attributes:
        record: what ran.
        times: when each op of it began.
        lost: whether a collective of the schedule has failed, so that no other can follow.
        draining: whether the program is over, so that only what other ranks wait for is still to be done.
    """

    def __init__(
        self, schedule: Schedule, positions: Positions, actions: Actions, shield: Shield | None = None
    ) -> None:
        self.schedule, self.ops, self.positions, self.actions = schedule, schedule.ops, positions, actions
        self.shield = shield or Shield()
        self.lost = self.draining = False
        self.cursor = 0
        self.microbatch = 0
        self.record: list[Op] = []
        self.times: list[float] = []

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op."""
        position = self.positions.get((kind, unit, index, self.microbatch), -1)
        if position < self.cursor:
            raise Mispredicted(f"{kind} {unit} #{index} is not ahead in the schedule")
        self._run_to(position)
        self.record.append(self.ops[position])
        self.times.append(perf_counter())
        self.cursor = position + 1

    def agree(self) -> None:
        """Run the first op, before which nothing can go wrong alone."""
        self._run_to(1)

    def settle(self) -> None:
        """Issue the ops that need not wait."""
        end = self.cursor
        while end < len(self.ops) and self.ops[end].kind in EAGER:
            end += 1
        self._run_to(end)

    def end_microbatch(self) -> None:
        """Nothing to add: the schedule holds it."""

    def readable(self, groups: Sequence[int]) -> bool:
        """Whether all of these groups can be read now."""
        return all(self.actions.live(self.schedule.groups[g].name) for g in groups)

    def outside(self, group: int) -> bool:
        """Whether the schedule keeps this group for code outside of units."""
        return group in self.schedule.program.reads[ROOT]

    def finish(self) -> None:
        """Run to the end of the schedule. After an error that is no ``CommError`` it can be called again."""
        self._run_to(len(self.ops))
        if len(self.times) == len(self.record):
            self.times.append(perf_counter())

    def drain(self) -> None:
        """Run to the end for the other ranks' sake. An op that failed is issued once more."""
        self.draining = True
        self.finish()

    def _run_to(self, position: int) -> None:
        if self.cursor >= position:
            return
        before, self.shield.open = self.shield.open, False
        while self.cursor < position:
            op = self.ops[self.cursor]
            if op.kind == "update":
                self._update(position)
                continue
            if op.kind not in COMPUTE:
                self._perform(op)
            self.cursor += 1  # only now: what has failed is still to be done
        if before:
            self.shield.reopen()

    def _perform(self, op: Op) -> None:
        begun = perf_counter()
        try:
            self.actions.perform(op)
        except CommError as error:
            self.lost = True
            raise CommError(f"op {self.cursor} of {len(self.ops)}, '{op}': {error}") from error
        self.record.append(op)
        self.times.append(begun)

    def _update(self, position: int) -> None:
        # Updates that follow each other are done together.
        end = self.cursor
        while end < position and self.ops[end].kind == "update":
            end += 1
        ops, begun = self.ops[self.cursor : end], perf_counter()
        try:
            self.actions.apply([op.target for op in ops])
        except Exception:
            if not self.draining:
                raise
            # It waits for whoever reads the state next. This step has failed anyway.
        self.cursor = end
        self.times += [begun] * len(ops)
        self.record += ops


class Again:
    """What units that run again inside of the backward read, and the unit whose backward is under way then.

    Activation checkpointing of several units at once runs all of them at the first of their backwards.
    """

    def __init__(self) -> None:
        self.under_way = ROOT
        self.reads: dict[str, dict[int, None]] = {}

    def reach(self, kind: str, unit: str) -> None:
        """The program is at this compute op."""
        self.under_way = unit if kind == "backward" else ROOT

    def note(self, groups: Sequence[int]) -> None:
        """These groups are read now."""
        self.reads.setdefault(self.under_way, {}).update(dict.fromkeys(groups))


class OnDemand:
    """Gathers what a unit reads when it is called, and writes the program down for a schedule.

    Everything gathered stays until the step is over, so this one step needs the memory of all parameters. All ranks
    must call units in the same order; each gather is agreed on first.

    Args:
        reads: the groups of a unit by its name; asked when a unit is called.
        agree: compares a request with all ranks; raises if they differ.
        closing: the ops that end the step, reductions and consensus.
        shield: holds signals back while ranks communicate.
    """

    def __init__(
        self,
        actions: Actions,
        names: Sequence[str],
        reads: Callable[[str], Sequence[int]],
        agree: Callable[[str], None],
        closing: Callable[[int], list[Op]],
        shield: Shield | None = None,
    ) -> None:
        self.actions, self.names, self.reads, self.agree, self.closing = actions, names, reads, agree, closing
        self.shield, self.lost = shield or Shield(), False
        self.microbatch = 0
        self.record: list[Op] = []
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        self.glue: dict[int, None] = {}
        self.again = Again()

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Gather what the unit reads, if it is not there."""
        self.again.reach(kind, unit)
        if unit != ROOT:
            for group in self.reads(unit):
                self.demand(group)
            calls = self.forward if kind == "forward" else self.backward
            if self.microbatch == 0:
                calls.append(Call(unit, index))
        self.record.append(Op(kind, unit, index, self.microbatch))

    def touch(self, group: int) -> None:
        """Code outside of units reads a leaf of this group."""
        self.glue[group] = None
        self.demand(group)

    def demand(self, group: int) -> None:
        """Make a group readable."""
        name = self.names[group]
        if not self.actions.live(name):
            with self.shield.closed():
                self._ask(f"all_gather {name}")
                for kind in ("all_gather", "wait all_gather"):
                    self._perform(Op(kind, name))

    def settle(self) -> None:
        """Nothing runs ahead on demand."""

    def readable(self, groups: Sequence[int]) -> bool:
        """What was gathered stays."""
        self.again.note(groups)
        return all(self.actions.live(self.names[g]) for g in groups)

    def outside(self, group: int) -> bool:
        """What is gathered is there for everybody. A schedule must know who reads it."""
        self.glue[group] = None
        return True

    def end_microbatch(self) -> None:
        """Reduce what the microbatch's backward left."""
        with self.shield.closed():
            self._ask(f"end of microbatch {self.microbatch}")
            failure: Exception | None = None
            for op in self.closing(self.microbatch):
                try:
                    self._perform(op)
                except CommError:
                    raise
                except Exception as error:  # the others are at this op: no rank leaves before it is done
                    failure = error
                    self._perform(op)
            if failure is not None:
                raise failure

    def finish(self) -> None:
        """Vote."""
        self._perform(Op("consensus", ""))

    def _ask(self, request: str) -> None:
        try:
            self.agree(request)
        except Exception as error:
            self.lost = True
            if isinstance(error, CommError):
                raise CommError(f"on demand, '{request}': {error}") from error
            raise

    def _perform(self, op: Op) -> None:
        try:
            self.actions.perform(op)
        except CommError as error:
            self.lost = True
            raise CommError(f"on demand, '{op}': {error}") from error
        self.record.append(op)


class Tracing:
    """Only writes down what the program does: the executor of a run on fake tensors.

    Args:
        turn: called whenever a compute op is over.
    """

    def __init__(self, turn: Callable[[], None]) -> None:
        self.turn = turn
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        self.glue: dict[int, None] = {}
        self.again = Again()

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Note the call."""
        self.turn()
        self.again.reach(kind, unit)
        if unit != ROOT:
            (self.forward if kind == "forward" else self.backward).append(Call(unit, index))

    def touch(self, group: int) -> None:
        """Note that code outside of units reads this group."""
        self.glue[group] = None

    def settle(self) -> None:
        """Nothing to run."""

    def readable(self, groups: Sequence[int]) -> bool:
        """Fake leaves are always there."""
        self.again.note(groups)
        return True

    def outside(self, group: int) -> bool:
        """It is noted, not judged."""
        self.glue[group] = None
        return True


def program_of(seen: Tracing | OnDemand, reads: Mapping[str, Sequence[int]]) -> Program:
    """The program that an executor saw: its calls, what each unit reads, and what the code between units reads."""
    used = {call.unit for call in seen.forward}
    again = seen.again.reads
    table = {
        unit: tuple(dict.fromkeys((*groups, *again.get(unit, ())))) for unit, groups in reads.items() if unit in used
    }
    glue = {*seen.glue, *again.get(ROOT, ())}
    return Program(tuple(seen.forward), tuple(seen.backward), {**table, ROOT: tuple(sorted(glue))})


def diverged(requests: Sequence[str]) -> ScheduleError:
    """The error of ranks that asked for different things at once."""
    rows = "".join(f"\n  rank {rank}: {text or 'failed'}" for rank, text in enumerate(requests))
    return ScheduleError(
        f"ranks left the common program:{rows}\nEvery rank must call the same units in the same order; what differs "
        f"between ranks belongs into the batch's tensors, not into Python control flow"
    )
