"""What happens when ranks fail: steps, saves, whole jobs."""
