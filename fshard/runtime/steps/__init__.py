"""One step on all ranks: from its program to what they decide together."""
