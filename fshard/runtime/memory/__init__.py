"""Memory of a step: the arena and its slots, gradients, host memory, and where optimizer state lies."""
