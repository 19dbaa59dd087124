"""Outer steps."""
