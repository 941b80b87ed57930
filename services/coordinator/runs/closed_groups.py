"""Pass rates over all groups that were scored, dropped ones included, step by step.

A curriculum or zero-variance filter drops what the model always or never solves, so pass@k of the trained groups alone
would be wrong. A dropped group counts for the step that was committed next.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaxd.evaluation.estimates import pass_at_k
from relaxd.run_folder import GROUPS, newest_lines

Result = tuple[int, int, bool]
"""Number of a group's samples, number of right ones, and whether all rewards are equal."""


class ClosedGroups:
    """Counts scored groups by step as they are closed. Lines have the form of groups.jsonl."""

    def __init__(self) -> None:
        self._since: Counter[Result] = Counter()
        """Results since the last group that a step trained."""
        self._by_step: dict[int, Counter[Result]] = {}

    def load(self, folder: Path, last_step: int) -> None:
        """Count the groups in a run's folder that were closed after this step."""
        newer: list[Mapping[str, Any]] = []
        for line in newest_lines(folder / GROUPS):
            if 0 < line.get("step", 0) <= last_step:
                break
            newer.append(line)
        self.observe(reversed(newer))

    def observe(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Process new lines, oldest first."""
        for line in lines:
            if "samples" in line:  # else it was not scored
                self._since[line["samples"], line["right"], "equal_rewards" in line] += 1
            if (step := line.get("step")) is not None:
                self._by_step.setdefault(step, Counter()).update(self._since)
                self._since.clear()

    def take(self, step: int) -> dict[str, float]:
        """Return the metrics of a step, and forget it and earlier ones. Empty if none of its groups is known."""
        groups = self._by_step.get(step)
        self._by_step = {later: counts for later, counts in self._by_step.items() if later > step}
        return metrics_of(groups) if groups else {}


def metrics_of(groups: Counter[Result]) -> dict[str, float]:
    """Return the metrics of groups, by the names of docs/metrics.md.

    pass_at_<k> is for k = 1, 2, 4 and so on, the mean of the groups with at least k samples.
    """
    total = groups.total()
    metrics = {
        "scored_groups": float(total),
        "zero_variance_share": sum(count for (_, _, equal), count in groups.items() if equal) / total,
        "all_right_share": sum(count for (n, right, _), count in groups.items() if right == n) / total,
        "all_wrong_share": sum(count for (_, right, _), count in groups.items() if not right) / total,
    }
    k, most = 1, max(n for n, _, _ in groups)
    while k <= most:
        values = [(pass_at_k(n, right, k), count) for (n, right, _), count in groups.items() if n >= k]
        metrics[f"pass_at_{k}"] = sum(value * count for value, count in values) / sum(count for _, count in values)
        k *= 2
    return metrics
