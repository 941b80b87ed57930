"""The Megatron runtime: process groups, CPU support, fusions, the channel between ranks.

Nothing here depends on a model.
"""
