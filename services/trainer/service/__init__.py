"""The trainer's parent process: its gRPC calls, and the ranks that it starts and watches.

Nothing here imports torch.
"""
