"""The MLP of a layer: dense, or a mixture of experts with its router.

`mixture.py` combines router, experts and shared expert.
"""
