"""Virtual meshes and shard_map: all ranks in one process."""
