"""Units that run as graphs."""
