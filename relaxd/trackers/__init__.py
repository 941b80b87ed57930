"""Trackers: a process beside the coordinator that shows a run's numbers outside of relaxd.

It reads files in the run's folder, so no other process waits for it. It needs only the standard library and the
trackers' own packages: it may have another interpreter than the coordinator.
"""

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker

__all__ = ["Edition", "TrackedRun", "Tracker"]
