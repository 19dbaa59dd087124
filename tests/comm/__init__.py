"""Communication between processes, and the pools of processes that tests use."""
