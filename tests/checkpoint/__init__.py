"""Train states on disk, and the ``fshard`` command."""
