"""The MLP of a layer: dense, or a mixture of experts with its router.

`mlp.py` combines router, experts and shared expert.
"""
