"""fs.launch."""
