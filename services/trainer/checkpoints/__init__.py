"""Checkpoints of a run on disk: the folders, and each rank's part in writing one.

Their content belongs to the learner (`services.trainer.learner.snapshots.snapshot`). `checkpoint_control` of
`services.trainer.loop` decides when to take one, and `checkpoint_restore` which one to load.
"""
