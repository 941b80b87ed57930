"""The Megatron runtime: process groups, CPU support, fusions, the channel between ranks.

Nothing here depends on a model.
"""

TICK_SECONDS = 0.5
"""Longest silence of one of them while it waits."""
ATTEMPT_VARIABLE = "RELAXD_ATTEMPT"
"""Environment variable with the number of the ranks' start, where they are on several hosts."""
