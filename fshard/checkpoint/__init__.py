"""Checkpoints: a train state on disk, complete or not at all, that any other mesh can read.

Lowest first: ``files`` (opens untrusted files), ``strict_json``, ``ranges`` (elements that two pieces share),
``tensorfile`` (safetensors headers), ``manifest`` (what a checkpoint holds), ``write``, ``folder`` (lock, rename,
removal), ``read`` (reads and verifies), ``save`` and ``restore`` (one of each, by all ranks), ``checkpointer``;
``convert`` (other forms).
"""
