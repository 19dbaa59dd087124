"""Meshes, specs, rules, layouts and plans, as values."""
