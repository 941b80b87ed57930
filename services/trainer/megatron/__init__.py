"""The Megatron runtime: process groups, CPU support, fusions, the channel between ranks.

Nothing here depends on a model.
"""

TICK_SECONDS = 0.5
"""Maximum seconds between the ticks by which a waiting rank 0 shows that it is alive."""
ATTEMPT_VARIABLE = "RELAXD_ATTEMPT"
"""Environment variable with the number of this start of the ranks, for ranks on several hosts."""
