"""Checkpoints of a run on disk: the folders, and each rank's part in writing one.

Their content belongs to the learner (`services.trainer.learner.snapshots.checkpoint`);
`services.trainer.loop.checkpoints` decides when to take one, `services.trainer.loop.restore` which one to load.
"""
