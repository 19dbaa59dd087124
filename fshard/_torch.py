"""The first import of PyTorch, without its warning that numpy is not installed: fshard does not need numpy.

A program that imports torch before fshard gets that warning from torch, which nobody else can keep back.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch

VERSION = str(torch.__version__)
