"""Files of a report: report.html, and curve.png with rewards and held-out evaluations over the steps."""

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relaxd.report.html_page import render_html
from relaxd.report.run_result import RunResult, read_result

SMOOTHED = 5
MARKED_STEPS = 200


def draw_curve(result: RunResult) -> bytes:
    """Draw reward, accuracy and format over the steps with the held-out evaluations, as PNG."""
    from matplotlib.figure import Figure  # slow to import, and only needed here
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rewards = _points(result.steps, "reward_mean")
    if rewards:
        steps, values = zip(*rewards, strict=True)
        marker = "." if len(steps) <= MARKED_STEPS else None  # thousands of them take seconds and hide the line
        axes.plot(steps, values, color="#93c5fd", linewidth=1, marker=marker, label="reward")
        axes.plot(
            steps, running_mean(values), color="#2563eb", linewidth=2.4, label=f"reward, mean of {SMOOTHED} steps"
        )
    for label, name, color, style in (
        ("accuracy (training)", "reward_accuracy", "#16a34a", "--"),
        ("answer format (training)", "reward_format", "#9ca3af", ":"),
    ):
        points = _points(result.steps, name)
        if points and points != rewards:  # the reward may be the accuracy
            axes.plot(*zip(*points, strict=True), style, color=color, linewidth=1.4, label=label)
    judged = "accuracy" if _points(result.evaluations, "eval_accuracy") else "reward"
    for name, label, color, marker in (
        (f"eval_{judged}", f"held-out {judged}, greedy", "#dc2626", "o"),
        ("eval_format", "held-out format, greedy", "#6b7280", "s"),
    ):
        points = _points(result.evaluations, name)
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=8, label=label, zorder=5)
            if name == f"eval_{judged}":
                for x, y in points:
                    axes.annotate(f"{y:.2f}", (x, y), (0, 9), textcoords="offset points", ha="center", color=color)
    axes.set_xlabel("step")
    axes.set_ylim(-0.04, 1.08) if _within_unit(result) else None
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        place = "best" if len(rewards) <= MARKED_STEPS else "lower right"  # the best is sought among all points
        axes.legend(frameon=False, fontsize=9, loc=place)
    axes.set_title(f"run {result.run_id}", loc="left", fontsize=11)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over the last SMOOTHED values of each position."""
    windows = [values[max(0, end - SMOOTHED) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _within_unit(result: RunResult) -> bool:
    return all(0 <= step["reward_mean"] <= 1 for step in result.steps)


def write_report(folder: Path) -> Path:
    """Write report.html, and with matplotlib curve.png, into a run's folder. Returns the report's path.

    Raises CliError.
    """
    result = read_result(folder)
    if find_spec("matplotlib") is not None:
        (folder / "curve.png").write_bytes(draw_curve(result))
    report = folder / "report.html"
    report.write_text(render_html(result), encoding="utf-8")
    return report
