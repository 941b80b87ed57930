"""Files of a report: report.html, with the data that its views ask for, and curve.png with rewards and held-out
evaluations over the steps.
"""

import base64
import gzip
import hashlib
import html
import io
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

from relaxd.client.folder_runs import read_sample
from relaxd.report.charts import chart_data, color
from relaxd.report.group_outcomes import outcome_message, read_fates
from relaxd.report.run_result import RunResult, place_of, read_result, results, table_of
from relaxd.report.step_times import GROUP, TRAINER, Breakdown, Steps, mean_rows, share_rows
from relaxd.rpc.message_parts import plain

SMOOTHED = 5
MARKED_STEPS = 200


def draw_curve(result: RunResult) -> bytes:
    """Return a PNG that shows reward, accuracy, format and held-out evaluations over the steps."""
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
    for label, name, paint, style in (
        ("accuracy (training)", "reward_accuracy", "#16a34a", "--"),
        ("answer format (training)", "reward_format", "#9ca3af", ":"),
    ):
        points = _points(result.steps, name)
        if points and points != rewards:  # the reward may be the accuracy
            axes.plot(*zip(*points, strict=True), style, color=paint, linewidth=1.4, label=label)
    judged = "accuracy" if _points(result.evaluations, "eval_accuracy") else "reward"
    for name, label, paint, marker in (
        (f"eval_{judged}", f"held-out {judged}, greedy", "#dc2626", "o"),
        ("eval_format", "held-out format, greedy", "#6b7280", "s"),
    ):
        points = _points(result.evaluations, name)
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=paint, markersize=8, label=label, zorder=5)
            if name == f"eval_{judged}":
                for x, y in points:
                    axes.annotate(f"{y:.2f}", (x, y), (0, 9), textcoords="offset points", ha="center", color=paint)
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
    """Return the running mean: for each position, the mean of the last SMOOTHED values up to it."""
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
"""Folder with the report's page and its views, which the console also serves."""
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
    """Return the Content-Security-Policy of the report's page, which allows only these scripts, and styles, images and
    sounds within the page."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    sources = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; media-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {sources}; {rest}"


def packed(data: Mapping[str, Any]) -> str:
    """Compress data for the report's page, as base64, which contains nothing that HTML could take for markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _embedded(data: Mapping[str, Any]) -> str:
    """Return data as JSON text without characters that HTML could read as markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def bundle(folder: Path, entry: str) -> str:
    """Return one JavaScript script with the module `entry` in `folder` and all modules that it imports.

    Browsers load no modules for a page opened as a file. Each import must be on a single line, of a whole module or of
    names, from the same folder. Exports must be declarations.
    """
    texts: dict[str, str] = {}
    _collect(folder, entry, texts)
    parts = [f'modules["{name}"] = (() => {{\n{_as_function(text)}\n}})();' for name, text in texts.items()]
    return "\n".join(['"use strict";', "{", "const modules = {};", *parts, "}"])


def _collect(folder: Path, name: str, texts: dict[str, str]) -> None:
    """Add a JavaScript module to `texts`, after the modules that it imports."""
    if name in texts:
        return
    text = (folder / name).read_text(encoding="utf-8")
    for match in IMPORT.finditer(text):
        _collect(folder, match[3], texts)
    texts[name] = text


def _as_function(text: str) -> str:
    """Convert a JavaScript module to the body of a function that returns the module's exports."""
    exports = ", ".join(match[2] for match in EXPORT.finditer(text))
    body = EXPORT.sub(r"\1 \2", IMPORT.sub(r'const \1\2 = modules["\3"];', text))
    return f"{body}\nreturn {{ {exports} }};"


SHOWN_STEPS = 100
"""Maximum number of steps in the report's table: the newest ones. Charts show all steps."""
SHOWN_ANSWERS = 100
"""Maximum number of answers in the report's table of an evaluation set."""
SHOWN_GROUPS = 200
"""Maximum number of groups in the report's list of groups: the newest ones."""
STEP_COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "reward_mean", "{:.3f}"),
    ("accuracy", "reward_accuracy", "{:.3f}"),
    ("format", "reward_format", "{:.3f}"),
    ("length", "response_length_mean", "{:.1f}"),
    ("staleness", "staleness_mean", "{:.2f}"),
    ("loss", "loss", "{:.4f}"),
    ("gradient norm", "grad_norm", "{:.3f}"),
    ("clipped", "clip_fraction", "{:.4f}"),
    ("engine/trainer log-prob difference", "logprob_difference", "{:.2e}"),
    ("tokens/s", "tokens_per_second", "{:.0f}"),
    ("seconds", "step_seconds", "{:.1f}"),
)
INVISIBLE = ("Cc", "Cf", "Zl", "Zp", "Zs")
"""Unicode categories whose characters are invisible."""
TEXTS = ("prompt", "response", "answer")
"""Text fields of samples, which `shown_text` prepares for display."""


def report_data(result: RunResult) -> dict[str, Any]:
    """Return the data of the report's page: the run, and by name what each view shows. The charts' data aren't
    included."""
    return {
        "run": _run(result),
        "answers": {
            "results": _results(result),
            "samples": {"samples": [_sample(line) for line in result.samples]},
            "answers": _evaluations(result),
            "groups": _groups(result),
            "config": {
                "config": result.config.model_dump(mode="json") if result.config else {},
                "changes_toml": result.changes_toml,
                "config_toml": result.config_toml,
            },
        },
    }


def _run(result: RunResult) -> dict[str, Any]:
    summary, groups = result.summary, None
    if "published" in summary:  # else it goes on
        counts = {"published": "published", "trained": "trained", "dropped": "dropped", "open": "in_flight"}
        groups = {name: summary.get(own) or 0 for name, own in counts.items()}
        groups["dropped_by_reason"] = summary.get("dropped_by_reason") or {}
    return {
        "run_id": result.run_id,
        "state": summary.get("state", ""),
        "reason": summary.get("reason", ""),
        "step": max((line["step"] for line in result.steps), default=0),
        "folder": str(result.folder),
        "groups": groups,
    }


def _results(result: RunResult) -> dict[str, Any]:
    summary, steps = result.summary, result.steps
    cards = [
        (f"held-out {name}", f"{before:.2f} → {after:.2f}", f"{after - before:+.2f}")
        for name, before, after in results(summary)
    ]
    cards.append(("steps", str(summary.get("steps", "?")), ""))
    outside, seconds = "", summary.get("wall_seconds")
    if seconds is not None:
        cards.append(("wall time", f"{seconds / 60:.1f} min", f"{seconds:.0f} s"))
        total = sum(step.get("step_seconds") or 0.0 for step in steps)
        outside = (
            f"{total:.1f} s in {len(steps)} steps, {max(0.0, seconds - total):.1f} s outside of them: start, first "
            "weights, evaluations, export."
        )
    shares = [{"label": label, "share": f"{share:.1%}"} for label, share in share_rows(steps)]
    times = [_breakdown(steps, whole) for whole in (TRAINER, GROUP)]
    times.append({"title": "of the time of all steps", "seconds": False, "rows": shares})
    more = f"The newest {SHOWN_STEPS} of {len(steps)}; all are in metrics.jsonl."
    return {
        "cards": cards,
        "facts": list(result.facts().items()),
        "alarms": result.alarms,
        "notes": [str(note) for note in summary.get("notes", [])],
        "outside": outside if steps else "",
        "times": [one for one in times if one["rows"]] if steps else [],
        "newest": more if len(steps) > SHOWN_STEPS else "",
        "steps": _steps(steps[-SHOWN_STEPS:]),
    }


def _breakdown(steps: Steps, whole: Breakdown) -> dict[str, Any]:
    rows = [
        {
            "label": part.label,
            "color": color(whole.parts.index(part)),
            "seconds": f"{seconds:.3f}",
            "share": f"{share:.1%}",
        }
        for part, seconds, share in mean_rows(steps, whole)
    ]
    return {"title": whole.title, "seconds": True, "rows": rows}


def _steps(shown: Steps) -> dict[str, Any]:
    columns = [column for column in STEP_COLUMNS if any(step.get(column[1]) is not None for step in shown)]
    rows = [
        ["" if step.get(name) is None else style.format(step[name]) for _, name, style in columns] for step in shown
    ]
    return _table([title for title, _, _ in columns], rows)


def _evaluations(result: RunResult) -> dict[str, Any]:
    """Return a table of the results of evaluations, and for each set its first and newest answers side by side."""
    return {
        "results": _table(*table_of(result.set_rows)),
        "sets": [{"name": name, **_set_answers(result, name)} for name in result.answered_sets],
    }


def _set_answers(result: RunResult, name: str) -> dict[str, Any]:
    steps = result.evaluation_steps(name)
    first, last = steps[0], steps[-1]
    newest = result.answers(last, name, SHOWN_ANSWERS + 1)
    before = {}
    if first != last:
        before = {place_of(answer): answer for answer in result.answers(first, name, SHOWN_ANSWERS)}
    head = ["prompt", "answer"]
    for step in sorted({first, last}):
        head += [f"response, step {step}", "reward"]
    rows = []
    for answer in newest[:SHOWN_ANSWERS]:
        row = [shown_text(answer.get("prompt", answer["index"])), shown_text(answer.get("answer", ""))]
        if first != last:
            row += _answer_cells(before.get(place_of(answer)))
        rows.append([*row, *_answer_cells(answer)])
    more = f"The first {SHOWN_ANSWERS}; all are in evaluations/." if len(newest) > SHOWN_ANSWERS else ""
    return _table(head, rows) | {"more": more}


def _answer_cells(answer: Mapping[str, Any] | None) -> list[str]:
    if answer is None:
        return ["", ""]
    return [shown_text(answer.get("response", "")), answer["error"] or f"{answer['reward']:.2f}"]


def _groups(result: RunResult) -> dict[str, Any]:
    newest = islice(read_fates(result.folder), SHOWN_GROUPS)
    return {"groups": [plain(outcome_message(line)) for line in newest], "complete": True}


def _sample(line: Mapping[str, Any]) -> dict[str, Any]:
    sample = plain(read_sample(line))
    said = [message | {"content": shown_text(message["content"])} for message in sample["conversation"]]
    return sample | {name: shown_text(sample[name]) for name in TEXTS} | {"conversation": said}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"head": list(head), "rows": list(rows)}


def shown_text(value: object) -> str:
    """Return a model's text for display: with at most one blank line in a row, or a note if nothing is visible."""
    text = str(value)
    if text and all(character.isspace() or unicodedata.category(character) in INVISIBLE for character in text):
        return f"(only {len(text)} blank characters)"
    return re.sub(r"\s*\n\s*\n", "\n\n", text.strip("\r\n\v\f"))
