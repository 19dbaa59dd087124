"""A foresight as one HTML page that needs no other file."""

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fshard.arguments import size_text
from fshard.foresight.foresee import Foresight
from fshard.foresight.foresight_tables import Section, sections
from fshard.foresight.remedies import Remedy, closing, largest
from fshard.view.charts import policies, scaling
from fshard.view.timeline import timeline
from fshard.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def _lines(seen: Foresight, found: Sequence[Remedy]) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fshard plan</title>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<style>{STYLE}</style></head><body><h1>fshard plan</h1>"
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
