"""Charts of predictions: the time of a step by policy, and by the number of ranks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fshard.arguments import size_text
from fshard.schedule.auto import Candidate
from fshard.view.figures import empty_figure
from fshard.view.timeline import ALERT, COLORS, FONT, GRAY, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 24
"""Policies that are drawn."""


def policies(candidates: Sequence[Candidate]) -> "Figure":
    """A bar for each policy, the fastest first: compute, and what is exposed of transfers.

    Raises:
        ImportError: matplotlib is not installed.
    """
    shown = candidates[:MOST]
    figure, ax = _figure(8.5, 0.6 + 0.24 * len(shown))
    for row, each in enumerate(shown):
        busy = (each.seconds - each.exposed) * 1e3
        ax.barh(row, busy, height=0.7, color=COLORS["param"])
        ax.barh(row, each.exposed * 1e3, left=busy, height=0.7, color=ALERT)
        words = f" {size_text(each.memory.peak_bytes)}"
        ax.text(each.seconds * 1e3, row, words, va="center", fontsize=FONT - 1, color=GRAY)
    ax.set_yticks(range(len(shown)), [str(each.policy) for each in shown], fontsize=FONT - 1)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds: compute, then what is exposed; beside the bars, memory", fontsize=FONT, color=GRAY)
    ax.margins(x=0.12)
    return figure


def scaling(seconds: Mapping[int, float]) -> "Figure":
    """The time of a step by the number of ranks, with as large a batch a rank.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, ax = _figure(6.5, 3.0)
    ax.plot([*seconds], [value * 1e3 for value in seconds.values()], marker="o", color=COLORS["param"])
    ax.set_xscale("log", base=2)
    ax.set_xticks([*seconds], [f"{ranks:,}" for ranks in seconds])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("ranks", fontsize=FONT, color=GRAY)
    ax.set_ylabel("milliseconds a step", fontsize=FONT, color=INK)
    return figure


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    figure = empty_figure("this chart", width, height)
    ax = figure.subplots()
    ax.tick_params(length=0, labelsize=FONT, labelcolor=GRAY)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure, ax
