"""The Megatron runtime: process groups, CPU support, fusions, the channel between ranks.

Nothing here depends on a model.
"""

TICK_SECONDS = 0.5
"""Longest silence of one of them while it waits."""
