"""When the ops of a schedule would run, given what ops and bytes cost: simulation without processes.

``calibrate`` measures costs on real ranks; ``LINKS``, ``DEVICES`` and ``Cluster`` say what machines promise.
"""

from fshard.foresight.calibrate import calibrate
from fshard.runtime.steps.rates import measured_peak
from fshard.schedule.costs import Costs, Link, Noise, read_costs
from fshard.schedule.machines import DEVICES, LINKS, Cluster
from fshard.schedule.simulate import Simulation, simulate

__all__ = [
    "Cluster",
    "Costs",
    "DEVICES",
    "LINKS",
    "Link",
    "Noise",
    "Simulation",
    "calibrate",
    "measured_peak",
    "read_costs",
    "simulate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
