"""Modules as trees and pure functions, units, initial values and random numbers."""
