"""The rollout service's parent process: gRPC server, rollout stage, and client of the engine's process.

Nothing here imports torch.
"""
