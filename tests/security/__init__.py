"""Files of strangers: bounds of memory and time, and no code that runs."""
