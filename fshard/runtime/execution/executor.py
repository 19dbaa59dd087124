"""Executors: the loop over a schedule's ops, and the one that gathers on demand where no schedule is known yet.

A program that skips calls of the schedule costs nothing but time: their communication runs all the same, so all ranks
issue the same collectives in one order. A call that is not ahead raises ``Mispredicted``: all ranks run it again.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TypeVar

from fshard.errors import CommError, ScheduleError
from fshard.runtime.engine.proxies import Mispredicted
from fshard.runtime.execution.route import Observer, Route, ScheduleActions
from fshard.runtime.execution.signals import Shield
from fshard.schedule.ops import COMPUTE_KINDS, ROOT, Call, Op

T = TypeVar("T")


class Scheduled:
    """Runs the ops of a schedule in its order.

    Args:
        route: the schedule.
        actions: what its ops do.
        shield: holds signals back while ranks communicate.
        observers: what is told of each op, beside those of the route.

    Attributes:
        record: what ran.
        times: when each op of it began; one more while an op that communicates is under way, and at the end.
        lost: whether a collective of the schedule has failed, so that no other can follow.
        draining: whether the program is over, so that only what other ranks wait for is still to be done.
    """

    def __init__(
        self,
        route: Route,
        actions: ScheduleActions,
        shield: Shield | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.route, self.ops, self.runs, self.actions = route, route.schedule.ops, route.runs, actions
        self.observers, self.observed = route.observers + observers, -1
        self.end = len(self.ops) - (self.ops[-1].kind == "consensus")
        self.shield = shield or Shield()
        self.lost, self.draining, self.cursor, self.microbatch = False, False, 0, 0
        self.record: list[Op] = []
        self.times: list[float] = []

    def reach(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op."""
        position = self.route.positions.get((kind, unit, index, self.microbatch), -1)
        if position < self.cursor:
            raise Mispredicted(f"{kind} {unit} #{index} is not ahead in the schedule")
        if self.observers:
            self._observe(-1)
        if position > self.cursor:
            self._run_to(position)
        if self.observers:
            self._observe(position)
        self.record.append(self.ops[position])
        self.times.append(perf_counter())
        self.cursor = position + 1

    def before(self, kind: str, unit: str, index: int) -> None:
        """Run everything that stands before this compute op, which is yet to come."""
        self._run_to(self.route.positions[kind, unit, index, self.microbatch])

    def place(self, computing: bool) -> str:
        """The op that the step has come to, in words; with ``computing`` the latest compute op, whose code runs."""
        done = [at for at in range(self.cursor) if computing and self.ops[at].kind in COMPUTE_KINDS]
        at = done[-1] if done else min(self.cursor, len(self.ops) - 1)
        return f"op {at} of {len(self.ops)}, '{self.ops[at]}'"

    def under_way(self) -> str:
        """The op that communicates now, with its unit and leaves, before what has failed; empty if none does."""
        op = self.ops[self.cursor]
        if len(self.times) == len(self.record):
            return ""
        return f"op {self.cursor} of {len(self.ops)}, '{op}'{self.actions.where(op.target)}: "

    def begin_microbatch(self, index: int) -> None:
        """A microbatch begins."""
        self.microbatch = index

    def handshake(self, run: Callable[[], T]) -> T:
        """Perform the first op, and return what it came to."""
        found = self._perform(run)
        self.cursor = 1
        return found

    def settle(self) -> None:
        """Issue the ops that need not wait."""
        if self.observers:
            self._observe(-1)
        end = self.route.settled[self.cursor]
        if end > self.cursor:
            self._run_to(end)

    def end_microbatch(self) -> None:
        """Nothing to add: the schedule holds it."""

    def readable(self, groups: Sequence[int]) -> bool:
        """Tell whether all of these groups can be read now."""
        return self.actions.readable.issuperset(groups)

    def outside(self, group: int) -> bool:
        """Tell whether the schedule keeps this group for code outside of units."""
        return group in self.route.schedule.program.reads[ROOT]

    def finish(self) -> None:
        """Run everything before the consensus. After an error that is no ``CommError`` it can be called again."""
        if self.observers:
            self._observe(-1)
        self._run_to(self.end)

    def drain(self) -> None:
        """Run the same for the other ranks. An op that failed is issued once more."""
        self.draining = True
        self.finish()

    def consensus(self, run: Callable[[], T]) -> T:
        """Perform the last op of a training step, or end an evaluation, whose schedule has no such op."""
        found = self._perform(run) if self.end < len(self.ops) else run()
        self.times.append(perf_counter())
        for observer in self.observers:
            observer.end_run()
        return found

    def _run_to(self, position: int) -> None:
        before, self.shield.open = self.shield.open, False
        while self.cursor < position:
            run = self.runs[self.cursor]
            if run is None:
                if self.ops[self.cursor].kind == "update":
                    self._update()
                    continue
            else:
                self._perform(run)
            self.cursor += 1  # only now: what has failed is still to be done
        if before:
            self.shield.reopen()

    def _perform(self, run: Callable[[], T]) -> T:
        if self.observers:
            self._observe(self.cursor)
        op = self.ops[self.cursor]
        self.times.append(perf_counter())
        try:
            found = run()
        except CommError as error:
            self.lost = True
            raise CommError(f"{self.under_way()}{error}") from error
        except BaseException:
            self.times.pop()  # the op is issued once more
            raise
        finally:
            if self.observers:
                self._observe(-1)
        self.record.append(op)
        return found

    def _update(self) -> None:
        # Updates that follow each other are done together.
        end, groups = self.route.updates[self.cursor]
        if self.observers:
            for position in range(self.cursor, end):
                self._observe(position)
        ops, count = self.ops[self.cursor : end], len(self.times)
        self.times += [perf_counter()] * len(ops)
        try:
            self.actions.apply(groups)
        except BaseException as error:
            if not (self.draining and isinstance(error, Exception)):
                del self.times[count:]
                raise
            # It waits for whoever reads the state next. This step has failed anyway.
        finally:
            if self.observers:
                self._observe(-1)
        self.cursor = end
        self.record += ops

    def _observe(self, at: int) -> None:
        """Tell observers that the op under way is over, and that another one begins, unless ``at`` is -1."""
        before, self.observed = self.observed, at
        for observer in self.observers:
            if before >= 0:
                observer.end(before, self.ops[before])
            if at >= 0:
                observer.begin(at, self.ops[at])


class Again:
    """Groups that units read which run again inside of the backward, and the unit whose backward is under way then.

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
        closing: the ops that end a microbatch, of its number.
        shield: holds signals back while ranks communicate.

    Attributes:
        scaled: the tables whose gradients are divided by counts of the batch.
        busy: whether an op of the schedule is under way, which writes to the memory of parameters.
    """

    def __init__(
        self,
        actions: ScheduleActions,
        names: Sequence[str],
        reads: Callable[[str], Sequence[int]],
        agree: Callable[[str], None],
        closing: Callable[[int], list[Op]],
        shield: Shield | None = None,
    ) -> None:
        self.actions, self.names, self.reads, self.agree, self.closing = actions, names, reads, agree, closing
        self.shield, self.lost, self.busy = shield or Shield(), False, False
        self.microbatch = 0
        self.record: list[Op] = []
        self.forward: list[Call] = []
        self.backward: list[Call] = []
        self.glue: dict[int, None] = {}
        self.scaled: dict[str, None] = {}
        self.again = Again()

    def begin_microbatch(self, index: int) -> None:
        """A microbatch begins."""
        self.microbatch = index

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
        if group not in self.actions.readable:
            with self.shield.closed():
                self.ask(f"all_gather {name}")
                self._perform_all([Op("all_gather", name), Op("wait all_gather", name)])

    def settle(self) -> None:
        """Nothing runs ahead on demand."""

    def readable(self, groups: Sequence[int]) -> bool:
        """Tell whether these groups can be read: what was gathered stays."""
        self.again.note(groups)
        return self.actions.readable.issuperset(groups)

    def outside(self, group: int) -> bool:
        """Return what is gathered is there for everybody. A schedule must know who reads it."""
        self.glue[group] = None
        return True

    def end_microbatch(self) -> None:
        """Reduce what the microbatch's backward left."""
        with self.shield.closed():
            self.ask(f"end of microbatch {self.microbatch}")
            self._perform_all(self.closing(self.microbatch))

    def handshake(self, run: Callable[[], T]) -> T:
        """Perform the first op of a step."""
        return self._perform(Op("handshake"), run)

    def consensus(self, run: Callable[[], T]) -> T:
        """Perform the last op of a step."""
        return self._perform(Op("consensus"), run)

    def ask(self, request: str) -> None:
        """Compare what is to come next with all ranks; whoever failed answers with its failure. Collective."""
        try:
            self.agree(request)
        except Exception as error:
            self.lost = True
            if isinstance(error, CommError):
                raise CommError(f"on demand, '{request}': {error}") from error
            raise

    def _perform_all(self, ops: Sequence[Op]) -> None:
        failure: Exception | None = None
        for op, run in zip(ops, self.actions.bind(ops), strict=True):
            if run is None:
                continue
            try:
                self._perform(op, run)
            except CommError:
                raise
            except Exception as error:  # the others are at this op: no rank leaves before it is done
                failure = error
                self._perform(op, run)
        if failure is not None:
            raise failure

    def _perform(self, op: Op, run: Callable[[], T]) -> T:
        self.busy = True
        try:
            found = run()
        except CommError as error:
            self.lost = True
            raise CommError(f"on demand, '{op}'{self.actions.where(op.target)}: {error}") from error
        finally:
            self.busy = False
        self.record.append(op)
        return found


def diverged(requests: Sequence[str]) -> ScheduleError:
    """The error of ranks that asked for different things at once."""
    rows = "".join(f"\n  rank {rank}: {text or 'failed'}" for rank, text in enumerate(requests))
    return ScheduleError(
        f"ranks left the common program:{rows}\nEvery rank must call the same units in the same order; what differs "
        f"between ranks belongs into the batch's tensors, not into Python control flow"
    )
