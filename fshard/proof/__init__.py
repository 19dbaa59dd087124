"""Proof that a train step computes what plain PyTorch computes: the same loss, gradients and update, leaf by leaf."""
