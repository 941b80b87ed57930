"""Renders curve.png and report.html of a run from the files in its folder."""

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from relaxd.client.errors import CliError
from relaxd.report.mismatch import draw_mismatch
from relaxd.report.times import render_times
from relaxd.v1 import coordinator_pb2 as pb

TEMPLATE = Path(__file__).with_name("report.html")
SUMMARY = "summary.json"
"""Written when a run ends."""
SMOOTHED = 5
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


@dataclass
class RunResult:
    """The results in a run's folder so far."""

    folder: Path
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    """One dict of metrics per optimizer step."""
    evaluations: list[dict[str, Any]]
    """Metrics lines with step, eval_accuracy and eval_format."""
    config_toml: str
    samples: list[dict[str, Any]]

    @property
    def run_id(self) -> str:
        """The run's id."""
        return str(self.summary.get("run_id") or self.folder.name)

    @property
    def state(self) -> str:
        """The run's state and reason for display."""
        return f"{self.summary.get('state', '')} · {self.summary.get('reason', '')}".strip(" ·")


def save_samples(folder: Path, samples: Sequence[pb.TrainedSample]) -> None:
    """Write samples.jsonl, so that the report can be made without the services."""
    lines = [json.dumps(sample_values(sample), ensure_ascii=False) for sample in samples]
    (folder / "samples.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def sample_values(sample: pb.TrainedSample) -> dict[str, Any]:
    """Return a sample's fields by name; protobuf's own JSON writes 64-bit numbers as text."""
    return {field.name: getattr(sample, field.name) for field in sample.DESCRIPTOR.fields}


def read_result(folder: Path) -> RunResult:
    """Read the folder of a finished or running run. Raises CliError for missing or invalid files."""
    try:
        ended = (folder / SUMMARY).exists() or not (folder / "run.json").exists()
        summary = json.loads((folder / (SUMMARY if ended else "run.json")).read_text())
        lines = _read_lines(folder / "metrics.jsonl", growing=not ended)
        samples = _read_lines(folder / "samples.jsonl") if (folder / "samples.jsonl").exists() else []
        config = folder / "config.toml"
        config_toml = config.read_text() if config.exists() else ""
    except (OSError, ValueError) as error:
        raise CliError(f"{folder} is not the folder of a run: {error}") from error
    if not ended:  # run.json is the coordinator's record
        summary = {"run_id": summary.get("run_id"), "state": str(summary.get("phase", "")).lower()} | {
            "steps": max((line.get("step", 0) for line in lines), default=0)
        }
    return RunResult(
        folder=folder,
        summary=summary,
        steps=[line for line in lines if line.get("step", 0) > 0 and line.get("reward_mean") is not None],
        evaluations=[line for line in lines if line.get("eval_accuracy") is not None],
        config_toml=config_toml,
        samples=samples,
    )


def write_report(folder: Path) -> Path:
    """Write curve.png and report.html into a run's folder. Returns the report's path. Raises CliError."""
    result = read_result(folder)
    image = draw_curve(result)
    (folder / "curve.png").write_bytes(image)
    report = folder / "report.html"
    report.write_text(render_html(result, image), encoding="utf-8")
    return report


def draw_curve(result: RunResult) -> bytes:
    """Draw reward, accuracy and format over the steps with the held-out evaluations, as PNG."""
    from matplotlib.figure import Figure  # slow to import, and only needed here
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 4.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rewards = _points(result.steps, "reward_mean")
    if rewards:
        steps, values = zip(*rewards, strict=True)
        axes.plot(steps, values, color="#93c5fd", linewidth=1, marker=".", label="reward")
        axes.plot(
            steps, _running_mean(values), color="#2563eb", linewidth=2.4, label=f"reward, mean of {SMOOTHED} steps"
        )
    for label, name, color, style in (
        ("accuracy (training)", "reward_accuracy", "#16a34a", "--"),
        ("answer format (training)", "reward_format", "#9ca3af", ":"),
    ):
        points = _points(result.steps, name)
        if points and points != rewards:  # the reward may be the accuracy
            axes.plot(*zip(*points, strict=True), style, color=color, linewidth=1.4, label=label)
    for name, label, color, marker in (
        ("eval_accuracy", "held-out accuracy, greedy", "#dc2626", "o"),
        ("eval_format", "held-out format, greedy", "#6b7280", "s"),
    ):
        points = _points(result.evaluations, name)
        if points:
            axes.plot(*zip(*points, strict=True), marker, color=color, markersize=8, label=label, zorder=5)
            if name == "eval_accuracy":
                for x, y in points:
                    axes.annotate(f"{y:.2f}", (x, y), (0, 9), textcoords="offset points", ha="center", color=color)
    axes.set_xlabel("optimizer step")
    axes.set_ylim(-0.04, 1.08) if _within_unit(result) else None
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="best")
    axes.set_title(f"run {result.run_id}", loc="left", fontsize=11)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def render_html(result: RunResult, image: bytes) -> str:
    """Render the report as one self-contained HTML file."""
    summary = result.summary
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=html.escape(result.run_id),
        state=html.escape(result.state),
        cards=_cards(summary),
        curve=base64.b64encode(image).decode(),
        time=render_times(result.steps, summary.get("wall_seconds")),
        mismatch=_mismatch(result.steps),
        counts=_counts(summary),
        steps=_steps_table(result.steps),
        samples=_samples_table(result.samples),
        config=html.escape(result.config_toml),
        notes="".join(f"<li>{html.escape(str(note))}</li>" for note in summary.get("notes", [])),
    )


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over the last SMOOTHED values."""
    windows = [values[max(0, end - SMOOTHED) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def _within_unit(result: RunResult) -> bool:
    return all(0 <= step["reward_mean"] <= 1 for step in result.steps)


def _cards(summary: Mapping[str, Any]) -> str:
    cards = []
    for name in ("accuracy", "format"):
        before, after = summary.get(f"{name}_before"), summary.get(f"{name}_after")
        if before is not None and after is not None:
            cards.append((f"held-out {name}", f"{before:.2f} → {after:.2f}", f"{after - before:+.2f}"))
    cards.append(("optimizer steps", str(summary.get("steps", "?")), ""))
    if (seconds := summary.get("wall_seconds")) is not None:
        cards.append(("wall time", f"{seconds / 60:.1f} min", f"{seconds:.0f} s"))
    return "".join(
        f'<div class="card"><div class="label">{html.escape(label)}</div><div class="value">{html.escape(value)}</div>'
        f'<div class="note">{html.escape(note)}</div></div>'
        for label, value, note in cards
    )


def _mismatch(steps: Sequence[Mapping[str, Any]]) -> str:
    if (image := draw_mismatch(steps)) is None:
        return ""
    data = base64.b64encode(image).decode()
    picture = f'<img alt="Log-prob differences over the steps" src="data:image/png;base64,{data}">'
    return f"<h2>Engine and trainer: log-prob differences</h2>{picture}"


def _counts(summary: Mapping[str, Any]) -> str:
    rows = [(name, summary.get(name)) for name in ("published", "trained", "dropped", "in_flight")]
    reasons = summary.get("dropped_by_reason") or {}
    rows += [(f"dropped: {reason}", count) for reason, count in sorted(reasons.items())]
    return _table(("groups", ""), [(name, "?" if count is None else str(count)) for name, count in rows])


def _steps_table(steps: Sequence[Mapping[str, Any]]) -> str:
    columns = [column for column in STEP_COLUMNS if any(step.get(column[1]) is not None for step in steps)]
    rows = [
        ["" if step.get(name) is None else style.format(step[name]) for _, name, style in columns] for step in steps
    ]
    return _table([title for title, _, _ in columns], rows)


def _samples_table(samples: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            str(sample.get("step", "")),
            str(sample.get("version", 0)),
            str(sample.get("prompt", "")),
            str(sample.get("response", "")),
            str(sample.get("answer", "")),
            f"{float(sample.get('reward', 0.0)):.2f}",
            f"{float(sample.get('advantage', 0.0)):+.2f}",
        )
        for sample in samples
    ]
    return _table(("step", "version", "prompt", "response", "answer", "reward", "advantage"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "<p>none</p>"
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _read_lines(path: Path, *, growing: bool = False) -> list[dict[str, Any]]:
    """Read the lines of a JSONL file; if it is `growing`, without an incomplete last one."""
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1] if growing else text
    return [json.loads(line) for line in lines.splitlines() if line.strip()]
