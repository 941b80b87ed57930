"""Checkpoints of a run on the disk: when one is taken, what makes it complete, which one is loaded.

What is in one is the learner's business (`services.trainer.learner`).
"""
