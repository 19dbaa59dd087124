"""The train state: what a step takes and returns, and its ways in and out of whole tensors."""
