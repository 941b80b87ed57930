"""A tracker of one's own: rewards as CSV.

[tracking]
trackers = ["examples/own_tracker.py:CsvTracker"]

[tracking.options]
file = "rewards.csv"
"""

from collections.abc import Mapping
from pathlib import Path

from relaxd.trackers import Edition, TrackedRun, Tracker


class CsvTracker(Tracker):
    """Writes a line for each step. A new edition has all steps, so it begins the file again."""

    def start(self, run: TrackedRun, edition: Edition) -> None:
        self.path = Path(run.settings["options"]["file"])
        if not edition.resumed:
            self.path.write_text("")

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(f"{step},{numbers['train/reward_mean']}\n")
