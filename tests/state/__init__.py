"""Train states, and their ways in and out of whole tensors."""
