"""The Megatron runtime: process groups, CPU support, fusions, the channel between ranks.

Nothing here depends on a model.
"""

TICK_SECONDS = 0.5
"""Maximum seconds between two ticks of a waiting rank."""
ATTEMPT_VARIABLE = "RELAXD_ATTEMPT"
"""Name of the environment variable that numbers the starts of ranks on several hosts."""
