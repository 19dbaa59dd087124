"""Virtual meshes, whose ranks are threads of one process, and ``fs.shard_map``, which runs on them and on real ones."""
