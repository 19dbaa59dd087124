"""Steps that are captured once as a graph, and replayed.

A graph is all that a step does on its device: the update of the step before, forward and backward with their transfers,
and the norms of gradients. Between two graphs the host reads one row of numbers, exchanges it, and decides. What
changes from step to step is in device memory that does not move: the batch, the dials, and seeds of generators. All
else has the address at which it was captured. With ``Policy(graph="segments")`` the graph is cut where a collective
begins and where it is waited for, and the host does both.

A capture does nothing on the device. So one that fails on any rank leaves no trace there, and all ranks run the step
eagerly.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

import torch

from fshard.errors import CommError
from fshard.runtime.comm import exchange
from fshard.runtime.comm.host_calls import Cut, HostCall, cutting
from fshard.runtime.execution import PendingUpdate, Update, rounded_groups
from fshard.runtime.execution.executor import Scheduled
from fshard.runtime.graphs.surroundings import Surroundings, recorded
from fshard.runtime.steps import Programs, Runner
from fshard.runtime.steps.failures import together
from fshard.runtime.steps.rank_end import DONE
from fshard.runtime.steps.readings import RuleNorms
from fshard.runtime.steps.records import Agreed, PassResult, ProgramRun, Ready
from fshard.runtime.whole_graph.device_capture import Capture, HostWork
from fshard.runtime.whole_graph.dials import Dials
from fshard.runtime.whole_graph.step_graph import (
    CAPTURES,
    CHANGED,
    ELSEWHERE,
    FIRST,
    FIRST_UPDATE,
    FULL,
    LATE,
    MOST,
    NO_UPDATE,
    OBSERVED,
    ON_DEMAND,
    READY,
    REFUSED,
    WARM,
    WHY,
    StepGraph,
    key_of,
)


class GraphRunner(Runner):
    """Runs a loss function as graphs where it can.

    Args:
        fn: the loss function.
        programs: the programs.
        rules: the number of clipping rules.
        capture: captures the work of the device.
        mode: "step", or "segments" to leave collectives to the host.

    Attributes:
        held: the graphs, and programs that are to become some.
        refusal: why this rank captures nothing more; empty if it does.
    """

    def __init__(self, fn: Callable[..., Any], programs: Programs, rules: int, capture: Capture, mode: str) -> None:
        super().__init__(fn, programs)
        self.capture, self.rules, self.mode = capture, rules, mode
        self.warm = WARM + bool(rounded_groups(programs.plan))  # the first update makes tables for rounding
        self.held: list[StepGraph] = []
        self.refusal = ""
        self._graph: StepGraph | None = None  # of the step under way, if it has one
        self._replayed = False
        self._interrupt: BaseException | None = None

    @functools.cached_property
    def dials(self) -> Dials:
        """The numbers that change from step to step."""
        return Dials(self.plan.mesh.device, self.rules)

    def drop(self) -> None:
        """Drop all graphs: communicators that they hold are about to end. On any thread."""
        for graph in [*self.held]:
            graph.replay = None
        self.held = []

    # -- what a rank can do -------------------------------------------------------------------------------------------

    def _handshake(self, ready: Ready, mode: int = 0) -> Agreed:
        self._replayed, self._interrupt = False, None
        return super()._handshake(ready, self._mode(ready))

    def _mode(self, ready: Ready) -> int:
        """Say how this rank can run a step: a number of ``step_graph``."""
        self._graph = None
        if ready.prepared.route is None:
            return ON_DEMAND
        if self.refusal:
            return REFUSED
        graph = self._graph = self._find(ready)
        if graph is None:
            return FULL
        if not isinstance(ready.executor, Scheduled) or ready.executor.observers:
            return OBSERVED
        if why := self._update_problem(ready.request.update):
            return why
        if graph.replay is not None:
            waits = _waits(ready.request.update)
            same = waits is None or waits.rounding is graph.rounding
            if same and (graph.surroundings is None or graph.surroundings.holds()):
                return READY
            graph.seen, graph.replay = 0, None
            return CHANGED
        if graph.seen < self.warm:
            return FIRST
        return CAPTURES if _waits(ready.request.update) is not None else NO_UPDATE

    def _find(self, ready: Ready) -> StepGraph | None:
        """The graph of a step; None if there is no room for it."""
        key, shards = key_of(ready.request.batch), ready.request.shards
        for graph in self.held:
            if graph.fits(key, ready.prepared, shards):
                return graph
        made = self.programs.made.values()
        self.held = [graph for graph in self.held if graph.shards() is not None and graph.prepared in made]
        if len(self.held) == MOST:
            self.held = [graph for graph in self.held if graph.replay is not None]
        if len(self.held) == MOST:
            return None
        self.held.append(StepGraph(key, ready.prepared, ref(shards)))
        return self.held[-1]

    def _update_problem(self, update: Update | None) -> int:
        """Say why a graph cannot make an update; 0 if it can, or if none waits."""
        pending = None if update is None else update.pending
        if pending is None or not pending.waiting:
            return 0
        if not isinstance(pending, PendingUpdate) or pending.broken:
            return ELSEWHERE
        if pending.grads.shards is not self.programs.memory.homes or pending.waiting.keys() != pending.groups:
            return ELSEWHERE
        if any([cut.late for cuts in pending.grads.update_slices.values() for cut in cuts]):
            return LATE
        return FIRST_UPDATE if pending.step == 0 else 0

    # -- run ----------------------------------------------------------------------------------------------------------

    def _run(self, agreed: Agreed) -> ProgramRun:
        worst, graph = max(agreed.modes), self._graph
        if graph is None or worst not in (READY, CAPTURES):
            return self._eager(agreed, worst)
        with together(self._meetings.transport):
            if worst == READY:
                self._load(graph, agreed.ready)
            elif (failure := self._captured(graph, agreed)) is not None:
                return self._after_failure(agreed, failure)
            return self._replay(graph, agreed, "replayed" if worst == READY else "captured")

    def _eager(self, agreed: Agreed, worst: int) -> ProgramRun:
        graph, mine = self._graph, agreed.modes[self.plan.mesh.together.rank]
        own = self.refusal if worst == REFUSED else ""
        where = "" if mine == worst else f"rank {agreed.modes.index(worst)}: "
        self._say(f"eager: {where}{own or WHY[worst]}")
        host = HostWork(self.plan.mesh.device)
        with host if graph is not None and graph.seen == self.warm - 1 and not self.refusal else nullcontext():
            ran = super()._run(agreed)
        if graph is not None and ran.end is DONE:
            graph.seen += 1
        if host.found:
            self._refuse(f"the host takes part in {', '.join(host.found)}")
        return ran

    def _say(self, text: str) -> None:
        self.latest = replace(self.latest, graph=text)

    def _refuse(self, why: str) -> None:
        """Capture nothing more."""
        self.refusal = why
        self.held.clear()
        warnings.warn(f"Policy(graph={self.mode!r}): steps run eagerly from now on, since {why}", stacklevel=6)

    def _after_failure(self, agreed: Agreed, failure: str) -> ProgramRun:
        """Run a step eagerly whose capture has failed on some rank."""
        ready = agreed.ready
        given = ready.request
        ready.prepared.actions.start(given.shards, given.update, False, given.accumulated, given.feedback)
        self._say(f"eager: {failure}")
        ran = super()._run(agreed)
        if ran.end is DONE:
            self._refuse(failure)
        return ran

    def _program(self, agreed: Agreed) -> PassResult:
        if self._interrupt is not None:
            raise self._interrupt
        return super()._program(agreed)

    # -- graphs -------------------------------------------------------------------------------------------------------

    def _captured(self, graph: StepGraph, agreed: Agreed) -> str | None:
        """Capture a step on all ranks. Nothing is done on the device. Collective.

        Returns:
            None; or on which rank it has failed, and how.
        """
        failure: BaseException | None = None
        try:
            with agreed.ready.request.randomness(), self._meetings.transport.program(), _unchanged(agreed):
                self._load(graph, agreed.ready)
                self._make(graph, agreed)
        except BaseException as error:
            failure, graph.replay = error, None
            self._interrupt = None if isinstance(error, Exception) else error
        finally:
            agreed.ready.prepared.actions.stop()
        control = self.programs.comms.control
        failed = [failure is not None]
        if control.size > 1:
            failed = [bool(row) for row in exchange(control, torch.tensor(failed, device="cpu")).flatten().tolist()]
        if not any(failed):
            return None
        rank, graph.replay = failed.index(True), None
        if failure is not None:
            return f"its capture failed: {type(failure).__name__}: {failure}"
        return f"rank {rank}: its capture failed"

    def _make(self, graph: StepGraph, agreed: Agreed) -> None:
        ready = self._inside(graph, agreed)
        inside, executor = replace(agreed, ready=ready), ready.executor
        assert isinstance(executor, Scheduled)

        def body(cut: Cut) -> tuple[PassResult, tuple[RuleNorms, Sequence[RuleNorms]]]:
            self.dials.begin()
            with ExitStack() as segments:
                if self.mode == "segments":
                    segments.enter_context(cutting(self._hosted(graph, inside, cut)))
                    segments.enter_context(self.programs.comms.in_segments())
                measured = self._program(inside)
                executor.finish()
            return measured, self._norms(ready)

        if (cuts := getattr(self._meetings.transport, "cuts", None)) is not None:
            cuts.graphs.add(self)
        with recorded() as reads:
            graph.replay, (graph.measured, graph.norms) = self.capture.capture(body)
        graph.record = tuple(executor.record)
        own = {code: space for code, space in reads.codes.items() if "__name__" in space}  # and none that was generated
        graph.surroundings = Surroundings(self.finder.fn, replace(reads, codes=own))

    def _hosted(self, graph: StepGraph, inside: Agreed, cut: Cut) -> Cut:
        """Cuts a capture so that a call of the host that fails says at which op, and what was not updated by then."""
        update, executor = inside.ready.request.update, inside.ready.executor
        assert update is not None and isinstance(update.pending, PendingUpdate) and isinstance(executor, Scheduled)
        waiting, stale = update.pending.waiting, update.stale

        def noted(call: HostCall) -> None:
            place, left = executor.under_way(), (tuple(waiting), tuple(stale))
            made = call.run  # and not the call: it holds memory that others may have after it

            def run() -> None:
                try:
                    made()
                except BaseException as error:
                    graph.left = left
                    if isinstance(error, CommError):
                        raise CommError(f"{place}{error}") from error
                    raise

            cut(replace(call, run=run))

        return noted

    def _inside(self, graph: StepGraph, agreed: Agreed) -> Ready:
        """The step as it is captured: with numbers from the dials, on the graph's own batch."""
        ready = agreed.ready
        given, prepared = ready.request, ready.prepared
        assert given.update is not None and prepared.route is not None
        update = Update(given.shards, given.update.pending, given.update.stale, self.dials)
        graph.rounding = given.update.pending.rounding if isinstance(given.update.pending, PendingUpdate) else None
        request = given._replace(update=update, randomness=nullcontext, seed=self.dials.seed)
        executor = Scheduled(prepared.route, prepared.actions, given.shield)
        executor.cursor = 1
        prepared.actions.start(given.shards, update, False, given.accumulated, self.dials.feedback)
        return replace(ready, request=request, executor=executor, parts=graph.parts)

    def _load(self, graph: StepGraph, ready: Ready) -> None:
        """Copy the batch and the numbers of a step to where its graph reads them, and end what reads the state."""
        given = ready.request
        graph.copy_batch(given.batch, self.programs.accumulate, self.plan.batch)
        self.dials.write(_waits(given.update), given.loss_scale / self.divisor, given.feedback)
        given.shards.overwrite()

    def _replay(self, graph: StepGraph, agreed: Agreed, how: str) -> ProgramRun:
        given, executor = agreed.ready.request, agreed.ready.executor
        assert given.update is not None and isinstance(executor, Scheduled)
        replay = graph.replay
        if replay is None:
            raise CommError("the step's graph was dropped by another thread, with the communicators that it calls")
        graph.left = None
        try:
            with given.randomness():
                replay()
        except BaseException as error:
            given.update.made(graph.left, f"a replay of its graph has failed: {error}")
            raise
        given.update.made(((), ()))
        torch.autograd.graph.increment_version(given.shards.tensors(range(len(given.shards))))
        executor.record += graph.record
        executor.times += [executor.times[-1]] * len(graph.record)
        executor.cursor, self._replayed = executor.end, True
        self._say(how)
        return ProgramRun(agreed, graph.result(), DONE)

    def _norms(self, ready: Ready) -> tuple[RuleNorms, Sequence[RuleNorms]]:
        if self._replayed and self._graph is not None:
            return self._graph.norms
        return super()._norms(ready)


def _waits(update: Update | None) -> PendingUpdate | None:
    """The update that a graph makes; None if there is none, or it was made."""
    pending = None if update is None else update.pending
    return pending if isinstance(pending, PendingUpdate) and pending.waiting else None


@contextmanager
def _unchanged(agreed: Agreed) -> Iterator[None]:
    """Afterwards the update of a step waits as before: what was captured is yet to be done."""
    update = agreed.ready.request.update
    assert update is not None and isinstance(update.pending, PendingUpdate)
    pending, waiting, stale = update.pending, dict(update.pending.waiting), dict(update.stale)
    try:
        yield
    finally:
        pending.waiting.update(waiting)
        pending.broken = ""
        update.stale.update(stale)
