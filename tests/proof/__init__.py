"""``fs.verify``."""
