"""The MLP of a layer: dense, or a mixture of experts with its router.

`mixture.py` puts router, experts and shared expert together.
"""
