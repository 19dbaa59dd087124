"""Looking at things: where tensors live, what a schedule does, and a step op by op; traces for other programs.

Views print, and show themselves in notebooks. Pictures are drawn with matplotlib, which is imported when one is drawn:
``pip install "fshard[view]"``.
"""

from fshard.view.chrome import trace
from fshard.view.flight_record import record
from fshard.view.plans import plan
from fshard.view.stepping import step_through
from fshard.view.tensors import sharding
from fshard.view.timeline import timeline

__all__ = ["plan", "record", "sharding", "step_through", "timeline", "trace"]


def __dir__() -> list[str]:
    return sorted(__all__)
