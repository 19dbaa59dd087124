"""Pictures. Drawn with matplotlib, which is imported when one is drawn: ``pip install "fshard[view]"``."""

from fshard.view.timeline import timeline

__all__ = ["timeline"]
