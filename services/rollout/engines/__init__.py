"""Inference engines. Each runs in a child process of the rollout service."""
