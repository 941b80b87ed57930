"""How often who waits shows that it lives."""

TICK_SECONDS = 0.5
"""Rank 0 ticks at least this often while it waits, and so do programs that follow a run."""
