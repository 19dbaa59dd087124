"""Tensor, sequence, expert and context parallelism."""
