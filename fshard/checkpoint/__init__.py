"""Checkpoints: a train state on disk, whole or not at all, for any other mesh to read.

Lowest first: ``ranges`` (which elements two pieces share), ``tensorfile`` (safetensors headers), ``manifest`` (what a
checkpoint holds, checked as hostile), ``write`` and ``read`` (files of one rank; no process knows of another),
``match`` (names of a checkpoint against those of a plan), ``folder`` (names, lock, rename, retention), ``meeting`` (all
ranks fail alike), ``checkpointer``.
"""
