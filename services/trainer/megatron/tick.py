"""The interval at which rank 0, and programs that follow a run, show that they live."""

TICK_SECONDS = 0.5
"""Longest silence of one of them while it waits."""
