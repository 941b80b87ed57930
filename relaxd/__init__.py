"""relaxd: asynchronous reinforcement-learning post-training for language models, as plain gRPC services."""

__version__ = "0.1.0"

PROTOCOL_VERSION = 2
"""Version of the wire protocol and of the board's layout. Services of different versions refuse each other."""
