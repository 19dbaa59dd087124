"""Train and evaluation steps, their metrics, and the training loop."""
