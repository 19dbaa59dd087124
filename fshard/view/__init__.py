"""Pictures and traces. Pictures are drawn with matplotlib, imported when one is: ``pip install "fshard[view]"``."""

from fshard.view.chrome import trace
from fshard.view.timeline import timeline

__all__ = ["timeline", "trace"]
