"""The rollout service's parent process: gRPC calls, the stage, and the client of the engine's process.

Nothing here imports torch.
"""
