"""Generated training runs against one plain PyTorch process: ``python -m tests.fuzz --cases 1000 --seed 0``."""
