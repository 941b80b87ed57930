"""Inference engines: two that run in a child process of the rollout service, and a client of external servers."""
