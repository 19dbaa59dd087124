"""Simulation without processes: when the ops of a schedule would run, given what ops and bytes cost.

``Costs.of(step.measured)`` has the costs of real steps; ``LINKS``, ``DEVICES`` and ``hardware`` say what machines
promise; ``search`` tries shapes of the mesh, recomputation and wire formats.
"""

from fshard.foresight.hardware import Hardware, hardware
from fshard.foresight.search import search
from fshard.foresight.search_table import Option, Search
from fshard.runtime.steps.measured_rates import measured_peak
from fshard.schedule.costs import Costs, Link, Noise, read_costs
from fshard.schedule.machines import DEVICES, LINKS, Cluster
from fshard.schedule.simulate import Simulation, simulate

__all__ = [
    "Cluster",
    "Costs",
    "DEVICES",
    "Hardware",
    "LINKS",
    "Link",
    "Noise",
    "Option",
    "Search",
    "Simulation",
    "hardware",
    "measured_peak",
    "read_costs",
    "search",
    "simulate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
