"""Optimizers, their schedules and states."""
