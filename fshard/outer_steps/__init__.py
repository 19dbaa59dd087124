"""Outer steps: replicas that train apart, and exchange what they have learned every so many steps.

DiLoCo (Douillard et al., 2023), Streaming DiLoCo (Douillard et al., 2025) and local SGD (Stich, 2019). ``buffers`` says
what a state holds for it, ``fragments`` which part of the model travels when, ``exchange`` how it does, and ``step`` is
the step that users call.
"""
