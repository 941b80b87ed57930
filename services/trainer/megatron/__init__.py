"""What makes Megatron run here: process groups, CPU support, fusions, the channel between ranks.

Nothing here knows a model.
"""
