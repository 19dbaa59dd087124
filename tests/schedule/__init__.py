"""Schedules as data: built, checked, simulated, printed, accounted and drawn."""
