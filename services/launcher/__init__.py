"""The launcher for containers: starts replicas in its own compose project. Only it has access to the Docker engine."""
