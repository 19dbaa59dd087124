"""HOW: communication, memory, and the loop that runs a schedule. No policy lives here."""
