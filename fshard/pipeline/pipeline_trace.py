"""The schedules of all positions of a pipeline as one value, and traces of steps with stages."""

import functools
import hashlib
from dataclasses import dataclass, field

from fshard import markup
from fshard.arguments import size_text
from fshard.pipeline.order_clock import bubble
from fshard.pipeline.orders import PipelineOrder, lanes
from fshard.pipeline.pipeline_simulation import PipelineSimulation, simulate_together
from fshard.schedule.costs import Costs
from fshard.schedule.schedule import Schedule
from fshard.schedule.step_trace import Trace


@dataclass(frozen=True, repr=False)
class PipelineSchedules:
    """The schedules of all positions on the axis of stages. ``print`` it: a lane a position, in columns of time.

    ``step.trace(batch).schedules`` has them before a step runs, and ``step.schedules`` those of the latest run.
    ``fs.sim.simulate(schedules, costs)`` simulates all of them together, ``fs.view.timeline(schedules)`` draws them.

    Attributes:
        order: the order of forwards and backwards.
        ranks: by position, the schedule of its ranks.

    >>> import torch, fshard as fs
    >>> params = {"layers": {n: {"w": torch.zeros(4, 4)} for n in "01"}}
    >>> layer, mesh = fs.unit(lambda p, x: torch.tanh(x @ p["w"])), fs.abstract_mesh((2, 1), ("stage", "data"))
    >>> def loss_fn(params, x):
    ...     return layer(params["layers"]["1"], layer(params["layers"]["0"], x)).sum()
    >>> stages, batch = fs.Stages("stage"), fs.P("data")
    >>> plan = fs.make_plan(params, mesh, [(".*", fs.P())], units=["layers.*"], batch=batch, stages=stages)
    >>> step = fs.make_train_step(loss_fn, fs.optim.sgd(0.1), plan, accumulate=2)
    >>> print(step.trace(torch.ones(4, 4)).schedules)
    1f1b: 2 stages at 2 positions, 2 microbatches, idle 33.3% if backwards take twice as long as forwards
    position 0  0F0 0F1     0B0     0B1
    position 1      1F0 1B0 1F1 1B1
    position 0: stage 0, 19 ops, arena 0 B, at most 768 B without activations; sends 64 B to other stages
    position 1: stage 1, 19 ops, arena 0 B, at most 768 B without activations; sends 64 B to other stages
    """

    order: PipelineOrder
    ranks: tuple[Schedule, ...]

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of the hashes of all schedules, in hex: equal if and only if all schedules are."""
        return hashlib.sha256("".join(each.hash for each in self.ranks).encode()).hexdigest()

    @property
    def idle(self) -> float:
        """The share of time in which ranks are idle, if backwards take twice as long as forwards, and messages none."""
        return bubble(self.order)

    def simulate(self, costs: Costs) -> PipelineSimulation:
        """Simulate all positions together: ``fs.sim.simulate(schedules, costs)``."""
        return simulate_together(self.ranks, costs)

    def __str__(self) -> str:
        return "\n".join([self._title(), *self._lanes(), *self._sizes()])

    def __repr__(self) -> str:
        return f"<PipelineSchedules {self._title()}>"

    def _repr_html_(self) -> str:
        texts = [markup.fold(f"position {at}: {each!r}", markup.pre(str(each))) for at, each in enumerate(self.ranks)]
        return markup.shown(self._title(), markup.pre("\n".join([*self._lanes(), *self._sizes()])), *texts)

    def _title(self) -> str:
        order = self.order
        sizes = f"{order.stages} stages at {len(self.ranks)} positions, {order.microbatches} microbatches"
        return f"{order.name}: {sizes}, idle {self.idle:.1%} if backwards take twice as long as forwards"

    def _lanes(self) -> list[str]:
        return [f"position {row.removeprefix('rank ')}" for row in lanes(self.order.ranks, self.order.stages)]

    def _sizes(self) -> list[str]:
        """A line for each position: its stages, and what it holds and sends."""
        rows = []
        for at, schedule in enumerate(self.ranks):
            stages = [str(stage) for stage, home in enumerate(self.order.homes) if home == at]
            moves = {(move.kind, group.name): move for group in schedule.groups for move in group.transfers}
            sent = sum(moves[op.kind, op.target].sent for op in schedule if op.kind == "send")
            memory = schedule.memory
            rows.append(
                f"position {at}: stage{'s' * (len(stages) > 1)} {', '.join(stages)}, {len(schedule)} ops, arena "
                f"{size_text(memory.arena_bytes)}, at most {size_text(memory.peak_bytes)} without activations; sends "
                f"{size_text(sent)} to other stages"
            )
        return rows


@dataclass(frozen=True)
class PipelineTrace(Trace):
    """A trace of a step with stages: all of this rank's part, and the schedules of all positions.

    ``schedule``, ``footprint``, ``needs``, ``unused`` and ``flops`` are those of this rank. An abstract mesh of another
    rank has those of another one: ``fs.abstract_mesh(sizes, names, rank=6)``.

    Attributes:
        schedules: those of all positions.
    """

    schedules: PipelineSchedules | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + ("" if self.schedules is None else self.schedules._repr_html_())
