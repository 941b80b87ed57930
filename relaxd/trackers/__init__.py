"""Trackers: a process beside the coordinator that shows a run's numbers outside of relaxd.

It reads the files in the run's folder, so that nothing waits for it. It needs only the standard library and the
trackers' own packages: it may have another interpreter than the coordinator.
"""

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker

__all__ = ["Edition", "TrackedRun", "Tracker"]
