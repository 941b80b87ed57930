"""Snapshots of a learner's state: how they are copied, written as sharded Megatron checkpoints, and read."""
