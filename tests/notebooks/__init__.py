"""The notebooks of examples/."""
