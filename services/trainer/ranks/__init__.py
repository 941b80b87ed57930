"""A host's ranks, for a trainer on another host (trainer.hosts).

Nothing here imports torch.
"""
