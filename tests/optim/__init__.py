"""Optimizers, their schedules and states, and LoRA."""
