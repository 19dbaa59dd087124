"""A foresight as one HTML page that needs no other file."""

import base64
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fshard.arguments import size_text
from fshard.foresight.foresee import Foresight
from fshard.foresight.foresight_tables import Section, sections
from fshard.foresight.remedies import Remedy, closing, largest
from fshard.foresight.staged_foresight import StagedForesight
from fshard.foresight.staged_tables import staged_closing, staged_sections
from fshard.schedule.auto import Candidate
from fshard.view.figures import empty_figure
from fshard.view.timeline import ALERT, COLORS, FONT, GRAY, INK, timeline
from fshard.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 24
"""Policies that are drawn."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22262e; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.5rem 0 2rem; }
td, th { text-align: left; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #e3e5ea; vertical-align: top; }
th { color: #6b7280; font-weight: 600; }
.wide { overflow-x: auto; }
td:first-child { white-space: nowrap; }
img { display: block; margin: 1rem 0; max-width: 100%; }
.wide img { max-width: none; }
.over { color: #c2410c; }
"""


def write_page(path: Path, seen: Foresight, found: Sequence[Remedy]) -> None:
    """Write the page, complete or not at all.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: it cannot be written there.
    """
    write_whole(path, "\n".join(_lines(seen, found)))


def write_staged_page(path: Path, seen: StagedForesight) -> None:
    """Write the page of a forecast of stages, complete or not at all.

    Raises:
        ImportError: matplotlib is not installed.
        PlanError: it cannot be written there.
    """
    write_whole(path, "\n".join([*_head(), *_staged_lines(seen), "</body></html>"]))


def _staged_lines(seen: StagedForesight) -> Iterator[str]:
    if not seen.fits:
        yield f'<h2 class="over">{html.escape(staged_closing(seen))}</h2>'
    for section in staged_sections(seen):
        yield from _table(section)
    yield "<h2>One step, simulated</h2>"
    yield f'<div class="wide">{_picture(timeline(seen.chosen.schedules, seen.chosen.simulation), 70)}</div>'


def _head() -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fshard plan</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body><h1>fshard plan</h1>"


def _lines(seen: Foresight, found: Sequence[Remedy]) -> Iterator[str]:
    yield from _head()
    if not seen.fits:
        limit = size_text(seen.hardware.memory or 0)
        yield f'<h2 class="over">No policy fits into {limit}</h2><ul>'
        yield from (f"<li>{html.escape(line)}</li>" for line in largest(seen))
        yield "</ul><p>What would change it:</p><ul>"
        yield from (f"<li>{html.escape(str(remedy))}</li>" for remedy in found)
        yield "</ul>"
        yield from (f"<p>{html.escape(line)}</p>" for line in closing(seen, found))
    for section in sections(seen):
        yield from _table(section)
    yield "<h2>One step, simulated, and the memory that it holds</h2>"
    yield f'<div class="wide">{_picture(timeline(seen.schedule, seen.simulation), 70)}</div>'
    yield f"<h2>Step time by policy</h2>{_picture(policies(seen.candidates), 90)}"
    yield f"<h2>Step time by ranks</h2>{_picture(scaling(seen.scaling), 90)}"
    yield "</body></html>"


def _table(section: Section) -> Iterator[str]:
    title, head, rows = section
    yield f'<h2>{html.escape(title)}</h2><div class="wide"><table>'
    if any(head):
        yield "<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
    yield "</table></div>"


def _picture(figure: "Figure", dpi: int) -> str:
    """A figure within the page."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    coded = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="" src="data:image/png;base64,{coded}">'


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
