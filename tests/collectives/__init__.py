"""Collectives by axis name, shard_map, and ranks played in one process."""
