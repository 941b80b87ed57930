"""The learner: model and optimizer, gradient accumulation, weight updates, snapshots of the state.

The loop decides when each of these happens.
"""
