"""The model room: modules as parameter trees and pure functions, units, initial values, random numbers."""

from fshard.model import initial_values as init
from fshard.model import philox
from fshard.model.initial_values import Initializer
from fshard.model.meta import empty_weights
from fshard.model.split import Model, split
from fshard.model.unit import Slot, Unit, attach, slot_of, unit

__all__ = [
    "Initializer",
    "Model",
    "Slot",
    "Unit",
    "attach",
    "empty_weights",
    "init",
    "philox",
    "slot_of",
    "split",
    "unit",
]
