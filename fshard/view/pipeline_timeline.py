"""All positions of a pipeline in one picture: a lane of forwards and backwards for each.

With a simulation the axis is time, below each lane are transfers within its stage and what it waits for, and lines show
messages between stages. Without one an action takes one unit of time, and a whole backward two.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fshard.arguments import expect
from fshard.pipeline.order_steps import play
from fshard.pipeline.orders import Action
from fshard.pipeline.pipeline_simulation import PipelineSimulation
from fshard.pipeline.pipeline_trace import PipelineSchedules
from fshard.schedule.ops import COMPUTE_KINDS, ROOT
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation
from fshard.schedule.transfers import awaited, started
from fshard.view.figures import empty_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"F": "#7fa3d1", "B": "#34548a", "I": "#34548a", "W": "#8fa98f"}
"""Of forwards, backwards, their first parts and their second ones."""

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of leaves"}
MOVES, WAITS, MESSAGE, INK, GRAY = "#c4c7cf", "#c2410c", "#d9914b", "#22262e", "#6b7280"
FONT = 8.5
CHARACTER = 0.066
"""Inches that a character of the font takes, about."""


@dataclass(frozen=True)
class ActionBar:
    """An action of a position, from ``begin`` to ``end``."""

    position: int
    action: Action
    begin: float
    end: float


def pipeline_timeline(schedules: PipelineSchedules, simulation: Any = None) -> "Figure":
    """Draw the schedules of all positions of a pipeline: ``fs.view.timeline(schedules)``.

    Args:
        schedules: those of all positions.
        simulation: what ``fs.sim.simulate(schedules, costs)`` gave.

    Raises:
        PlanError: something else than such a simulation.
        ImportError: matplotlib is not installed.
    """
    wanted = (PipelineSimulation, type(None))
    expect("timeline(schedules)", [("simulation", simulation, wanted, "what fs.sim.simulate(schedules, costs) gave")])
    bars = list(action_bars(schedules, simulation))
    end = max([bar.end for bar in bars], default=0.0)
    span = max(end if simulation is None else simulation.seconds, end) or 1.0
    width, count = min(max(3.0 + 0.3 * len(bars) / len(schedules.ranks), 8.0), 40.0), len(schedules.ranks)
    figure = empty_figure("fs.view.timeline", width, 1.3 + 0.62 * count)
    ax = figure.subplots()
    chunks = schedules.order.chunks
    for bar in bars:
        _draw(ax, bar, chunks, span / (width - 1.6) * CHARACTER)
    if simulation is not None:
        for position, each in enumerate(simulation.ranks):
            _draw_moves(ax, position, each)
        for begin, arrival, sender, receiver in messages(simulation):
            places = [sender + 0.25, receiver + 0.25]
            ax.plot([begin, arrival], places, color=MESSAGE, linewidth=0.7, zorder=4)
    _frame(ax, schedules, span)
    said = (
        "from left to right: time, if an action takes one unit and a whole backward two"
        if simulation is None
        else f"from left to right: time. {str(simulation).splitlines()[0]}. Orange: messages. Red: waits"
    )
    ax.set_xlabel(said, fontsize=FONT, color=GRAY, loc="left")
    _legend(ax, {bar.action.kind for bar in bars})
    order = schedules.order
    title = f"{order.name}: {order.stages} stages at {count} positions, {order.microbatches} microbatches"
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT + 1.5, color=INK, weight="bold")
    return figure


def action_bars(schedules: PipelineSchedules, simulation: PipelineSimulation | None = None) -> Iterator[ActionBar]:
    """The bars of all positions, in units of time, or in the seconds of a simulation."""
    order = schedules.order
    if simulation is None:
        played = play(order.ranks, order.stages, lambda action: 2.0 if action.kind == "B" else 1.0)
        for position, lane in enumerate(order.ranks):
            for action, begin, end in zip(lane, played.starts[position], played.ends[position], strict=False):
                yield ActionBar(position, action, begin, end)
        return
    for position, schedule in enumerate(schedules.ranks):
        yield from _simulated(position, schedule, order.ranks[position], simulation.ranks[position])


def _simulated(
    position: int, schedule: Schedule, lane: tuple[Action, ...], simulation: Simulation
) -> Iterator[ActionBar]:
    """The portions of a schedule, with their actions: the n-th forward of a microbatch is its n-th action F."""
    due, (each,) = _by_kind(lane), schedule.stages.passes
    kinds = {"forward": "F", "backward": "I", "weight": "W"}
    computes = iter([at for at, op in enumerate(schedule) if op.kind in COMPUTE_KINDS])
    for portion in each.portions:
        places = [next(computes) for _ in range(portion.first, portion.end)]
        units = [schedule[at] for at in places if schedule[at].target != ROOT]
        if not units:  # the end of a microbatch alone
            continue
        kind = kinds[units[0].kind]
        action = due[kind, portion.microbatch].pop(0)
        if each.program.parted and action.kind == "B":
            action = Action(action.stage, kind, action.microbatch)
        yield ActionBar(position, action, simulation.starts[places[0]], simulation.ends[places[-1]])


def _by_kind(lane: tuple[Action, ...]) -> dict[tuple[str, int], list[Action]]:
    """The actions of each kind and microbatch; a whole backward is both of its parts."""
    found: dict[tuple[str, int], list[Action]] = defaultdict(list)
    for action in lane:
        for kind in ("I", "W") if action.kind == "B" else (action.kind,):
            found[kind, action.microbatch].append(action)
    return found


def messages(simulation: PipelineSimulation) -> Iterator[tuple[float, float, int, int]]:
    """Begin and arrival of each message, the position that sends it, and the one that receives it."""
    begun: dict[tuple[str, int], tuple[float, float, int]] = {}
    for position, each in enumerate(simulation.ranks):
        for at, op in enumerate(each.schedule):
            if op.kind == "send":
                begun[op.target, op.microbatch] = each.starts[at], each.ends[at], position
    for position, each in enumerate(simulation.ranks):
        for op in each.schedule:
            if op.kind == "receive":
                begin, end, sender = begun[op.target, op.microbatch]
                yield begin, end, sender, position


def _draw(ax: "Axes", bar: ActionBar, chunks: int, character: float) -> None:
    """A bar with its microbatch, or where positions have several stages with the whole action."""
    color = COLORS[bar.action.kind]
    ax.barh(
        bar.position + 0.25,
        bar.end - bar.begin,
        left=bar.begin,
        height=0.5,
        color=color,
        edgecolor="white",
        linewidth=0.8,
        zorder=2,
    )
    text = str(bar.action) if chunks > 1 else str(bar.action.microbatch)
    if (len(text) + 0.5) * character <= bar.end - bar.begin:
        x, ink = (bar.begin + bar.end) / 2, INK if bar.action.kind in "FW" else "white"
        ax.text(x, bar.position + 0.26, text, ha="center", va="center", fontsize=FONT - 0.5, color=ink, zorder=5)


def _draw_moves(ax: "Axes", position: int, simulation: Simulation) -> None:
    """Transfers within a stage, and the times in which its device waits."""
    for at, op in enumerate(simulation.schedule):
        begin, end = simulation.starts[at], simulation.ends[at]
        row = started(op.kind)
        if row is not None and row.stage != "edge" and end > begin:
            ax.barh(position + 0.6, end - begin, left=begin, height=0.12, color=MOVES, zorder=2)
        held = simulation.issued[at]
        if end > held and (awaited(op.kind) is not None or op.kind == "consensus"):
            ax.barh(position + 0.72, end - held, left=held, height=0.06, color=WAITS, zorder=3)


def _frame(ax: "Axes", schedules: PipelineSchedules, span: float) -> None:
    homes, count = schedules.order.homes, len(schedules.ranks)
    stages = [", ".join(str(stage) for stage, home in enumerate(homes) if home == at) for at in range(count)]
    names = [f"position {at}\nstage{'s' * (',' in stages[at])} {stages[at]}" for at in range(count)]
    ax.set_yticks([at + 0.25 for at in range(count)], names)
    for text in ax.get_yticklabels():
        text.set(color=INK, fontsize=FONT)
    ax.set_ylim(count - 0.1, -0.15)
    ax.set_xlim(0, span * 1.01)
    ax.set_xticks([])
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _legend(ax: "Axes", kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    shown = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in COLORS if kind in kinds]
    ax.legend(handles=shown, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, frameon=False, fontsize=FONT)
