"""The rollout service's parent process: its calls, its stage, and the engine as it sees it.

Nothing here imports torch.
"""
