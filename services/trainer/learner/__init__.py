"""The learner: a model with its optimizer, which accumulates gradients and updates weights.

Its state, with checkpoints of it, is here; when something happens is decided in the loop.
"""
