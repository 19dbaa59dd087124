"""The transform room: losses as pure functions of shards, for torch.func and torch.autograd, and tools on them."""
