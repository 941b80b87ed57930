"""Files of a report: report.html, and curve.png with rewards and held-out evaluations over the steps."""

import base64
import gzip
import hashlib
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from relaxd.report.charts import chart_data
from relaxd.report.report_data import report_data
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
    """Return, for each position, the mean of the last SMOOTHED values."""
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


ASSETS = Path(__file__).with_name("assets")
"""Folder of the views, which the console serves as well, and of the report's page."""
IMPORT = re.compile(r'^import (?:\* as (\w+)|(\{[\w, ]*\})) from "\./(\w+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?function|const|class) (\w+)", re.MULTILINE)


def render_html(result: RunResult) -> str:
    """Render the report of a run as one self-contained HTML file."""
    scripts = [_asset("uplot/uPlot.iife.min.js"), _asset("charts.js"), bundle(ASSETS, "report.js")]
    return Template(_asset("report.html")).substitute(
        title=html.escape(result.run_id),
        policy=_policy(scripts),
        uplot_css=_asset("uplot/uPlot.min.css"),
        css=_asset("page.css"),
        license=html.escape(_asset("uplot/LICENSE")),
        uplot=scripts[0],
        charts=scripts[1],
        script=scripts[2],
        chart_data=packed(chart_data(result.lines)),
        data=_embedded(report_data(result)),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(scripts: list[str]) -> str:
    """Return the page's Content-Security-Policy: only its own scripts, and styles, images and sounds within the
    page."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {sources}; {rest}"


def packed(data: Mapping[str, Any]) -> str:
    """Compress data for the page; base64 holds nothing that HTML could take for markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON without characters that HTML could read as markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def bundle(folder: Path, entry: str) -> str:
    """Return one script with the module `entry` of a folder and all modules that it imports.

    Browsers load no modules for a page opened as a file. Each import must be on a single line, of a whole module or of
    names, from the same folder. Exports must be declarations.
    """
    texts: dict[str, str] = {}
    _collect(folder, entry, texts)
    parts = [f'modules["{name}"] = (() => {{\n{_as_function(text)}\n}})();' for name, text in texts.items()]
    return "\n".join(['"use strict";', "{", "const modules = {};", *parts, "}"])


def _collect(folder: Path, name: str, texts: dict[str, str]) -> None:
    """Add a module after the modules that it imports."""
    if name in texts:
        return
    text = (folder / name).read_text(encoding="utf-8")
    for match in IMPORT.finditer(text):
        _collect(folder, match[3], texts)
    texts[name] = text


def _as_function(text: str) -> str:
    """Return the body of a function that returns a module's exports."""
    exports = ", ".join(match[2] for match in EXPORT.finditer(text))
    body = EXPORT.sub(r"\1 \2", IMPORT.sub(r'const \1\2 = modules["\3"];', text))
    return f"{body}\nreturn {{ {exports} }};"
