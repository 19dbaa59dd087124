"""Collectives by axis name."""
