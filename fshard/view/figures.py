"""Figures of ``fs.view.sharding`` and ``fs.view.plan``, by matplotlib: ``pip install "fshard[view]"``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fshard.errors import missing_extra
from fshard.markup import COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def empty_figure(call: str, width: float, height: float) -> "Figure":
    """A white figure of so many inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401 - whether it is there: the next line may be cached

        from fshard.view.picture import Picture
    except ImportError as error:
        raise missing_extra(call, "matplotlib", "view") from error
    return Picture(figsize=(width, height), layout="constrained", facecolor="white")


def cell_figure(title: str, cells: Sequence[Sequence[tuple[int, ...]]], ranks: int) -> "Figure":
    """A grid of cells in the colors of the ranks that hold them."""
    figure = empty_figure("fs.view.sharding(...).figure", 8, 0.6 + 0.32 * max(1, len(cells)))
    axes = figure.subplots()
    for row, line in enumerate(cells):
        for column, held in enumerate(line):
            color = COLORS[min(held, default=7) % len(COLORS)]
            axes.barh(row, 1, left=column, height=1, color=color, edgecolor="white", linewidth=0.5)
            axes.text(column + 0.5, row, " ".join(map(str, held[:4])), ha="center", va="center", fontsize=7, color="w")
    axes.invert_yaxis()
    axes.set_axis_off()
    axes.set_title(f"{title}: numbers are ranks, of {ranks}", fontsize=9, loc="left")
    return figure


def bar_figure(title: str, labels: Sequence[str], units: Sequence[str], held: Sequence[Sequence[int]]) -> "Figure":
    """A bar for each label, made of the units."""
    figure = empty_figure("fs.view.plan(...).figure", 8, 0.9 + 0.28 * len(labels))
    axes, lefts = figure.subplots(), [0.0] * len(labels)
    for number, (unit, row) in enumerate(zip(units, held, strict=True)):
        color = COLORS[number % len(COLORS)]
        axes.barh(range(len(labels)), row, left=lefts, color=color, edgecolor="white", linewidth=0.5, label=unit)
        lefts = [left + size for left, size in zip(lefts, row, strict=True)]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("bytes", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, fontsize=9, loc="left")
    if len(units) <= len(COLORS):
        axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.25))
    return figure
