"""Looking at plans, tensors and steps."""
