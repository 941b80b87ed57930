"""The results of a sweep: one table and one plot of several runs, from their folders."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relaxd.best_checkpoint import WatchedMetric
from relaxd.report.report_files import running_mean
from relaxd.report.run_result import RunResult, read_result
from relaxd.run_folder import is_run

LAST_STEPS = 5
"""Last steps over which the reward is averaged."""
TABLE = "sweep.csv"
PLOT = "sweep.png"
MAX_COLORS = 10
"""Number of colours of matplotlib's default cycle; further runs get other line styles."""
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One run of a sweep."""

    run_id: str
    settings: Mapping[str, Any]
    """The settings in which runs of the sweep differ."""
    result: RunResult | None
    """Result of the run; None before it begins."""

    @property
    def label(self) -> str:
        """Settings of the run in readable form."""
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in self.settings.items())

    @property
    def state(self) -> str:
        """Outcome of the run, or its progress."""
        if self.result is None:
            return "not begun"
        return str(self.result.summary.get("outcome") or "not ended")

    @property
    def reward(self) -> float | None:
        """Mean reward of its last steps."""
        last = [line["reward_mean"] for line in self.result.steps[-LAST_STEPS:]] if self.result else []
        return sum(last) / len(last) if last else None

    def evaluated(self, metric: WatchedMetric) -> dict[int, float]:
        """Return the metric by step, the initial model's included."""
        lines = self.result.lines if self.result else []
        return {line["step"]: line[metric.key] for line in lines if line.get(metric.key) is not None}


def read_row(run_id: str, settings: Mapping[str, Any], folder: Path) -> SweepRow:
    """Read the results of a run, which may not have begun."""
    return SweepRow(run_id=run_id, settings=settings, result=read_result(folder) if is_run(folder) else None)


def sweep_table(rows: Sequence[SweepRow], metric: WatchedMetric | None) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells: settings, steps, reward, and the best and the last value of a metric.

    The best run is first; those without a result are last.
    """
    names = sorted({name for row in rows for name in row.settings})
    titles = ["run", *names, "state", "steps", "reward"]
    titles += [f"best {metric.metric}", "at step", f"last {metric.metric}"] if metric else []
    cells = []
    for row in sorted(rows, key=lambda row: _order(row, metric)):
        line = [row.run_id, *(str(row.settings.get(name, "")) for name in names), row.state]
        line += [str(len(row.result.steps)) if row.result else "", _shown(row.reward)]
        if metric is not None:
            values = row.evaluated(metric)
            best = metric.best(values)
            line += [_shown(values[best]), str(best), _shown(values[max(values)])] if best is not None else [""] * 3
        cells.append(line)
    return titles, cells


def _order(row: SweepRow, metric: WatchedMetric | None) -> tuple[bool, float]:
    """Return the key by which rows are sorted."""
    if metric is None:
        return row.reward is None, -(row.reward or 0.0)
    values = row.evaluated(metric)
    best = metric.best(values)
    if best is None:
        return True, 0.0
    return False, values[best] if metric.lowest else -values[best]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def write_sweep(folder: Path, rows: Sequence[SweepRow], metric: WatchedMetric | None) -> list[Path]:
    """Write the table, and with matplotlib the plot, into a folder. Returns their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    titles, cells = sweep_table(rows, metric)
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([titles, *cells])
    if find_spec("matplotlib") is None:
        return [folder / TABLE]
    _draw(folder / PLOT, rows, metric)
    return [folder / TABLE, folder / PLOT]


def _draw(path: Path, rows: Sequence[SweepRow], metric: WatchedMetric | None) -> None:
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(9, 4.6 if metric is None else 8), dpi=150, layout="constrained")
    panels = figure.subplots(1 if metric is None else 2, squeeze=False)[:, 0]
    for number, row in enumerate(rows):
        style = {"color": f"C{number % MAX_COLORS}", "linestyle": LINES[number // MAX_COLORS % len(LINES)]}
        if row.result is not None and (steps := row.result.steps):
            rewards = running_mean([line["reward_mean"] for line in steps])
            panels[0].plot([line["step"] for line in steps], rewards, label=row.label, **style)
        if metric is not None and (values := row.evaluated(metric)):
            panels[1].plot(list(values), list(values.values()), marker="o", label=row.label, **style)
    titles = ("reward, mean of 5 steps", f"{metric.set_name}: {metric.metric}" if metric else "")
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title, loc="left", fontsize=11)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png")
