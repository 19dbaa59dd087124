"""A schedule as a picture: what is in flight beside each compute op, and what memory holds meanwhile.

The horizontal axis is the order of ops, not time: times are unknown before a step runs. Compute ops are
wide and all others narrow, so a transfer that spans a compute op is one that can hide behind it. With a simulation
the axis is the time that its costs lead to.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from fshard.arguments import expect, size_text
from fshard.pipeline.pipeline_simulation import PipelineSimulation
from fshard.pipeline.pipeline_trace import PipelineSchedules
from fshard.schedule.offsets import Span, profile
from fshard.schedule.ops import COMPUTE_KINDS, LOCAL, ROOT, UNIT_KINDS, Op, Program
from fshard.schedule.schedule import Schedule
from fshard.schedule.simulate import Simulation
from fshard.schedule.transfers import KINDS, item_words, started
from fshard.view.figures import empty_figure
from fshard.view.pipeline_timeline import pipeline_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    "param": "#7d8fb3",
    "grad": "#d9a05b",
    "leaf": "#e8c9a0",
    "fill": "#f0dcc0",
    "shard": "#8fa98f",
    "own": "#6f8f6f",
    "update": "#a58fb0",
    "reduce_scatter": "#b5b8bf",
}
"""The colors of items of memory. The staging of other transfers is of a lighter gray."""

NARROW = 0.13
"""The width of all ops but compute ops, whose width is 1."""

INK, PALE, BAND, GRAY, ALERT = "#22262e", "#8a8f99", "#f3f4f7", "#6b7280", "#c2410c"
OUTSIDE = (0.42, 0.45, 0.5, 1.0)
"""The color of groups and of code outside of units."""

CAPTION = "from left to right: the order of ops, not time.  Outlined: a transfer with no compute op to hide behind."
TIMED = "from left to right: time.  Outlined: a transfer that compute waits for.\nThe step: "

FONT = 8.5
CHARACTER = 0.066
"""Inches that a character of the font takes, about."""


@dataclass(frozen=True)
class Bar:
    """One bar of a lane, from ``begin`` to ``end`` on the axis of ops, in the color of ``group``, if any.

    ``exposed``: a transfer that spans no compute op, so that it has nothing to hide behind.
    """

    lane: str
    label: str
    group: str
    begin: float
    end: float
    exposed: bool = False


def timeline(
    schedule: Schedule | PipelineSchedules, simulation: Simulation | PipelineSimulation | None = None
) -> "Figure":
    """Draw a schedule: a lane for compute, updates and each kind of transfer, and below them memory.

    Of all schedules of a pipeline it draws a lane for each position on the axis of stages.

    Args:
        schedule: the schedule, for example ``step.trace(batch).schedule`` on an abstract mesh; or, of a pipeline,
            ``step.trace(batch).schedules``.
        simulation: what ``fs.sim.simulate(schedule, costs)`` gave, or ``step.measured``: the axis is then time.

    Returns:
        A figure of its own, which pyplot does not know: ``figure.savefig("step.png")``.

    Raises:
        PlanError: no schedule, such as a step, which has one: ``step.schedule``.
        ImportError: matplotlib is not installed.
        ScheduleError: the ops open or close a lifetime twice.

    Example::

        fs.view.timeline(step.trace(batch).schedule).savefig("step.png")
        fs.view.timeline(step.schedule, step.measured).savefig("measured.png")
    """
    if isinstance(schedule, PipelineSchedules):
        return pipeline_timeline(schedule, simulation)
    wants = [
        ("schedule", schedule, Schedule, "step.schedule, or step.trace(batch).schedule"),
        ("simulation", simulation, (Simulation, type(None)), "what fs.sim.simulate returned, or step.measured"),
    ]
    expect("timeline(schedule)", wants)
    assert not isinstance(simulation, PipelineSimulation)  # else it was refused
    edges = positions(schedule.ops)
    if simulation is None or not simulation.seconds:
        drawn = list(bars(schedule))
    else:
        scale = edges[-1] / simulation.seconds
        edges = [time * scale for time in (*simulation.issued, simulation.seconds)]
        drawn = list(bars(schedule, simulation, scale))
    width = min(max(2.0 + 0.66 * edges[-1], 10.0), 40.0)
    rows = stacked(drawn, edges[-1] / (width - 1.6) * CHARACTER)
    highest = {bar.lane: row for bar, row in sorted(rows, key=lambda pair: pair[1])}
    heights = {lane: 1 + highest[lane] for lane in lanes() if lane in highest}
    lanes_height = 0.27 * sum(heights.values()) + 0.12 * len(heights) + 0.3
    figure = empty_figure("fs.view.timeline", width, lanes_height + 2.6)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[lanes_height, 1.75])
    colors = _colors(schedule)
    for ax in (top, below):
        _bands(ax, schedule.ops, edges)
    _lanes(top, rows, heights, colors)
    _phases(top, schedule, edges)
    _memory(below, schedule, edges)
    caption = CAPTION if simulation is None else f"{TIMED}{str(simulation).splitlines()[0].removeprefix('step ')}"
    below.set_xlabel(caption, fontsize=FONT, color=GRAY, loc="left")
    what = "train step" if schedule.train else "evaluation"
    passes = schedule.stages.passes
    counts = f"accumulate={schedule.accumulate}" if isinstance(schedule.program, Program) else f"{len(passes)} passes"
    title = f"One {what}, {len(schedule)} ops: {schedule.policy} {counts}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT + 2, color=INK, weight="bold")
    return figure


def _colors(schedule: Schedule) -> dict[str, Any]:
    """The color of each group of units."""
    from matplotlib import colormaps

    names = [group.name for group in schedule.groups if group.name.partition("/")[0] != ROOT]
    shades = colormaps["viridis"]([0.08 + 0.8 * i / max(1, len(names) - 1) for i in range(len(names))])
    return dict(zip(names, shades, strict=True))


def lanes() -> list[str]:
    """The lanes from top to bottom: what brings parameters, compute, what gradients go through, updates."""
    before = [row.name for row in KINDS.values() if row.stage != "gradient"]
    return [*before, "compute", *(row.name for row in KINDS.values() if row.stage == "gradient"), "update"]


def positions(ops: Sequence[Op]) -> list[float]:
    """Say where each op begins on the axis, and where the last one ends.

    >>> positions([Op("all_gather", "a"), Op("forward", "a"), Op("free", "a")])
    [0.0, 0.13, 1.13, 1.26]
    """
    steps = (1.0 if op.kind in COMPUTE_KINDS else NARROW for op in ops)
    return [round(x, 6) for x in accumulate(steps, initial=0.0)]


def bars(schedule: Schedule, simulation: Simulation | None = None, scale: float = 1.0) -> Iterator[Bar]:
    """The bars of all lanes: a transfer lasts from its issue to the op that waits for it.

    With a simulation it lasts from its first byte to its arrival, and a second is ``scale`` on the axis.
    """
    ops, edges, owners = schedule.ops, positions(schedule.ops), _owners(schedule)
    for at, op in enumerate(ops):
        row, computes = started(op.kind), op.kind in COMPUTE_KINDS
        if row is None and not computes and op.kind != "update":
            continue
        end = at + 1 if row is None else _waited(ops, at, row.wait)
        exposed = row is not None and not any(between.kind in COMPUTE_KINDS for between in ops[at:end])
        begin, over = edges[at], edges[end]
        if simulation is not None:
            exposed = row is not None and simulation.ends[end] > simulation.issued[end]
            begin, over = simulation.starts[at] * scale, simulation.ends[at] * scale
        group = op.target if not computes else owners[op.microbatch].get(op.target, "") if op.kind != LOCAL else ""
        label = str(op) if op.kind == LOCAL else op.target
        yield Bar("compute" if computes else op.kind, label, group, begin, over, exposed)


def _owners(schedule: Schedule) -> list[dict[str, str]]:
    """For each microbatch, the first group that each unit reads: its color is the unit's."""
    names = [group.name for group in schedule.groups]
    owners = {
        id(each): {unit: names[ids[0]] for unit, ids in each.program.reads.items() if ids and unit != ROOT}
        for each in schedule.stages.passes
    }
    return [owners[id(each)] for each in schedule.stages.microbatches]


def _waited(ops: Sequence[Op], start: int, wait: str) -> int:
    """Say where the wait of the transfer is that begins at ``start``."""
    return next(n for n in range(start, len(ops)) if (ops[n].kind, ops[n].target) == (wait, ops[start].target))


def stacked(items: Iterable[Bar], character: float) -> list[tuple[Bar, int]]:
    """Each bar with its row in its lane: bars that overlap, with their labels, lie in different rows.

    ``character`` is the width of one on the axis of ops.
    """
    ends: dict[str, list[float]] = {lane: [] for lane in lanes()}
    placed = []
    for bar in sorted(items, key=lambda bar: bar.begin):
        rows = ends[bar.lane]
        row = next((i for i, end in enumerate(rows) if end <= bar.begin), len(rows))
        if row == len(rows):
            rows.append(0.0)
        outside = 0.0 if fits(bar, character) else (len(bar.label) + 1) * character
        rows[row] = bar.end + (0.0 if bar.lane == "compute" else outside)
        placed.append((bar, row))
    return placed


def fits(bar: Bar, character: float) -> bool:
    """Tell whether a bar's label fits into it."""
    return (len(bar.label) + 1) * character <= bar.end - bar.begin


def live(schedule: Schedule) -> dict[str, list[int]]:
    """The bytes alive at each op by kind of item: ``param``, ``grad``... They sum to ``memory.profile``."""
    memory = schedule.memory
    items: dict[str, list[tuple[int, Sequence[Span]]]] = {kind: [] for kind in item_words()}
    for item, spans in memory.lifetimes.items():
        items[item.partition(":")[0]].append((memory.sizes[item], spans))
    return {kind: profile(len(schedule), lives) for kind, lives in items.items()}


def _bands(ax: "Axes", ops: Sequence[Op], edges: Sequence[float]) -> None:
    for at, op in enumerate(ops):
        if op.kind in COMPUTE_KINDS:
            ax.axvspan(edges[at], edges[at + 1], color=BAND, linewidth=0, zorder=0)
    ax.set_xlim(-0.05, edges[-1] + 0.5)  # room for the last label
    ax.tick_params(length=0, labelsize=FONT, labelcolor=GRAY)
    ax.set_xticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


def _lanes(ax: "Axes", rows: Sequence[tuple[Bar, int]], heights: Mapping[str, int], colors: Mapping[str, Any]) -> None:
    tops = dict(zip(heights, accumulate((height + 0.45 for height in heights.values()), initial=0.0), strict=False))
    character = _character(ax)
    for bar, row in rows:
        color = colors.get(bar.group, OUTSIDE)
        y, width = tops[bar.lane] + row, bar.end - bar.begin
        rim, line = (ALERT, 1.4) if bar.exposed else ("white", 0.8)
        ax.barh(y + 0.5, width, left=bar.begin, height=0.84, color=color, edgecolor=rim, linewidth=line, zorder=2)
        _label(ax, bar, y + 0.52, character, INK if sum(color[:3]) > 1.55 else "white")
    ax.set_yticks([tops[lane] + heights[lane] / 2 for lane in heights], [*heights])
    for text in ax.get_yticklabels():
        text.set(color=INK, weight="bold", fontsize=FONT + 1)
    ax.set_ylim(max(tops[lane] + heights[lane] for lane in heights) + 0.1, -0.95)


def _character(ax: "Axes") -> float:
    """The width of a character on the axis of ops."""
    low, high = ax.get_xlim()
    width = ax.figure.get_figwidth()  # type: ignore[union-attr]
    return float((high - low) / (width - 1.6) * CHARACTER)


def _label(ax: "Axes", bar: Bar, y: float, character: float, inside: str) -> None:
    style: dict[str, Any] = {"va": "center", "fontsize": FONT, "zorder": 3}
    if fits(bar, character):
        ax.text((bar.begin + bar.end) / 2, y, bar.label, ha="center", color=inside, **style)
    elif bar.lane == "compute":
        short = (bar.group or bar.label).rpartition(".")[2]
        if (len(short) + 1) * character <= bar.end - bar.begin:
            ax.text((bar.begin + bar.end) / 2, y, short, ha="center", color=inside, **style)
    else:
        ax.text(bar.end + character / 2, y, bar.label, ha="left", color=INK, **style)


def _phases(ax: "Axes", schedule: Schedule, edges: Sequence[float]) -> None:
    """A line over each run of forward and of backward ops."""
    several, character = len(schedule.stages.microbatches) > 1, _character(ax)
    computes = [(at, op) for at, op in enumerate(schedule.ops) if op.kind in UNIT_KINDS]
    for (kind, microbatch), run in groupby(computes, key=lambda pair: (pair[1].kind, pair[1].microbatch)):
        places = [at for at, _ in run]
        begin, end = edges[places[0]], edges[places[-1] + 1]
        words = f"{kind} @{microbatch}" if several else kind
        ax.plot([begin + 0.05, end - 0.05], [-0.3, -0.3], color=PALE, linewidth=1.0, solid_capstyle="butt")
        if len(words) * character <= end - begin:  # others would lie on each other
            ax.text((begin + end) / 2, -0.42, words, ha="center", va="bottom", fontsize=FONT + 0.5, color=GRAY)


def _memory(ax: "Axes", schedule: Schedule, edges: Sequence[float]) -> None:
    """The bytes in use, by kind, the size of the arena, and the peak."""
    below = [0] * len(schedule)
    memory = schedule.memory
    for (kind, words), values in zip(item_words().items(), live(schedule).values(), strict=True):
        above = [a + b for a, b in zip(below, values, strict=True)]
        if any(values):
            low, high = ([*line, line[-1]] for line in (below, above))
            ax.fill_between(
                edges, low, high, step="post", color=COLORS.get(kind, "#c9ccd2"), linewidth=0, label=words, zorder=2
            )
        below = above
    size = memory.peak_bytes
    for level in (size, memory.arena_bytes):
        ax.axhline(level, color=ALERT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)
    ax.set_ylim(0, max(size, 1) * 1.45)
    ticks = [0, size // 2, size] if size else [0]
    ax.set_yticks(ticks, [*map(size_text, ticks)])
    ax.set_ylabel("memory", fontsize=FONT + 1, color=INK, weight="bold")
    words = f"{size_text(size)} at most; the arena, which is there all the time, has {size_text(memory.arena_bytes)}"
    ax.text(edges[-1], size * 1.03, words, ha="right", va="bottom", fontsize=FONT, color=ALERT)
    if any(below):
        ax.legend(loc="upper left", ncols=4, frameon=False, fontsize=FONT, labelcolor=INK, borderaxespad=0.1)
