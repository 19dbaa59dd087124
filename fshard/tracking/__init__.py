"""Tracking of a run while it trains: metrics as plain numbers, and the trackers that they go to."""
