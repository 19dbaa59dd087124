"""Interchange: train states to and from the formats of others, without any rank holding the whole model.

Whatever is read is a *source*: named whole tensors that can be read in part. Whatever is written comes from ``export``,
which gathers one leaf at a time.
"""
