"""Interchange: train states to and from the formats of other libraries, where no rank holds the whole model.

Readers are *sources*: named whole tensors that can be read in part. Writers use ``export``, which gathers one leaf at a
time, or write what each rank holds.
"""
