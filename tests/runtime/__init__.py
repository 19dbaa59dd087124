"""Tracing, recomputation, memory and communicators of running steps."""
