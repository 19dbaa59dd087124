"""Reports on the latest run of a step, and on a trace: alike for all that runs on a schedule."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor

from fshard import tree
from fshard.collectives.scope import bind
from fshard.errors import PlanError
from fshard.runtime.engine import Remat
from fshard.runtime.engine.batch import check_even, on_meta
from fshard.runtime.execution import ProgramTrace
from fshard.runtime.execution.route import Observer
from fshard.runtime.steps import Latest, Prepared, Runner
from fshard.schedule.ops import Op
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation, measured
from fshard.schedule.step_trace import Trace
from fshard.sharding.plan import Plan


class Runs(Protocol):
    """A runner of steps."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def latest(self) -> Latest:
        """The latest run."""


class LatestRun:
    """A report on the latest run on this rank."""

    _runner: Runs

    @property
    def schedule(self) -> Schedule:
        """The schedule of the latest run. ``print`` it. ``trace`` finds one without a run.

        Raises:
            PlanError: nothing has run yet, or the latest run gathered on demand, or part by part.
        """
        latest = self._runner.latest
        if latest.schedule is not None:
            return latest.schedule
        if latest.apart:
            raise PlanError(
                f"no schedule: the latest run went part by part, since {latest.apart}. Each part has a schedule of its "
                f"own, such as grad.schedule of grad = fs.value_and_grad(...)"
            )
        if latest.record:
            raise PlanError("no schedule: the latest run gathered on demand; the next with such a batch has one")
        raise PlanError("no schedule yet: it is found from a batch; run it once, or ask trace, which runs nothing")

    @property
    def latest(self) -> Latest:
        """The latest run, as the runtime keeps it."""
        return self._runner.latest

    @property
    def record(self) -> tuple[Op, ...]:
        """Return what the latest run did on this rank, op by op.

        It equals ``schedule.ops`` if the program kept to it.
        """
        return tuple(self._runner.latest.record)

    @property
    def measured(self) -> Simulation:
        """The latest run on this rank, in the form of a simulation: ``print`` it, or draw it.

        Times are those of the host, which on a GPU runs ahead of the device. A transfer counts as under way until the
        op that waits for it is over, since nothing tells when it has arrived.

        Raises:
            PlanError: the latest run did not keep to a schedule, or there was none.
        """
        times = self._runner.latest.times
        if not times or self.record != self.schedule.ops:
            raise PlanError("nothing was measured: the latest run left its schedule, was made on demand, or is to come")
        return measured(self.schedule, times, device=self._runner.plan.mesh.device.type)


class OneFunction(LatestRun):
    """A runner of one function of ``(params, batch)``: what a trace finds of it, and what its units run as."""

    _runner: Runner

    def trace(self, batch: Any) -> Trace:
        """Return what a run on batches like this one does, without running it. Needs no processes: any mesh will do.

        Raises:
            PlanError: the function depends on values of tensors, so that only a real run finds its program.
            BatchError: a run would refuse the batch: its rows cannot be cut into equal microbatches.
        """
        runner = self._runner
        with bind(runner.plan.mesh, runner.plan.data_axes):
            found = runner.finder.look(batch)
        if found is None and (meta := on_meta(batch)):
            raise PlanError(
                f"{', '.join(meta)}: on meta, and the program looks at values of the batch: give tensors on the "
                f"device of the mesh, such as torch.zeros(...)"
            )
        if found is None:
            raise PlanError(
                "the program depends on values of the batch's tensors, which a trace does not have: run it once; it "
                "gathers on demand and finds the schedule for the next"
            )
        if runner.programs.train and not found.weighted:
            check_even(batch, runner.programs.accumulate)
        size = sum([x.nbytes for x in tree.leaves(batch) if isinstance(x, Tensor)])
        return replace(runner.programs.trace(found, functools.partial(self._retraced, batch)), batch_bytes=size)

    def _retraced(self, batch: Any, remat: Remat) -> ProgramTrace | None:
        runner = self._runner
        with bind(runner.plan.mesh, runner.plan.data_axes):
            return runner.finder.again(batch, remat)

    @contextmanager
    def observed(self, batch: Any, observer: Observer) -> Iterator[Prepared]:
        """While it lasts, an observer is told of the ops of runs on batches like this one.

        Yields:
            The program of the batch, which runs with memory of its own.

        Raises:
            PlanError: as ``trace``.
        """
        self.trace(batch)
        with self._runner.observed(batch, observer) as prepared:
            yield prepared

    @property
    def units(self) -> str:
        """Return what the units met so far run as: a graph, and which other units share it; or themselves, and why."""
        cache = self._runner.programs.cache
        return "every unit runs as it is: compile=None" if cache is None else cache.text()
