"""Figures that notebooks show, whether pyplot was imported or not."""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


class Picture(Figure):
    """A figure that is its own picture: a notebook shows a plain ``Figure`` as text until pyplot was used."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        FigureCanvasAgg(self).print_png(out)  # type: ignore[no-untyped-call]
        return out.getvalue()
