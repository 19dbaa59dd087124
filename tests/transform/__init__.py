"""Losses of shards under torch.func, and tools on them."""
