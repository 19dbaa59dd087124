"""When the ops of a schedule would run, given what ops and bytes cost: simulation without processes."""

from fshard.runtime.steps.rates import measured_peak
from fshard.schedule.simulate import Costs, Link, Simulation, simulate

__all__ = ["Costs", "Link", "Simulation", "measured_peak", "simulate"]
