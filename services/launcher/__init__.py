"""The launcher: starts replicas as containers of its own compose project. Only it can reach the Docker engine."""
