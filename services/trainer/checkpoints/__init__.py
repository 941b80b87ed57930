"""Checkpoints of a run on disk: when to take one, when it is complete, which one to load.

Their content belongs to the learner (`services.trainer.learner.checkpoint`).
"""
