"""Low-rank adapters: in trees, in models, and merged into their weights."""
