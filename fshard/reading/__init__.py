"""Files that somebody else may have written: opened, bounded and parsed in one place."""
