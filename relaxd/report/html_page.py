"""Renders report.html: one file with the charts, their library and data, which needs no network to be looked at."""

import base64
import gzip
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from relaxd.media.shown import THUMBNAIL_URI, conversation_lines, media_line
from relaxd.report.charts import chart_data, color
from relaxd.report.run_result import RunResult, place_of, results, table_of
from relaxd.report.step_times import GROUP, TRAINER, Breakdown, Steps, mean_rows, share_rows

ASSETS = Path(__file__).with_name("assets")
SHOWN_STEPS = 100
"""Steps in the table, the newest; the charts show all."""
SHOWN_ANSWERS = 100
"""Answers in the table of a set."""
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
"""Unicode's categories of characters that leave no ink."""
SCRIPTS = ("uplot/uPlot.iife.min.js", "charts.js", "report.js")
"""Scripts of the page. It runs no others, whatever a model has written."""


def render_html(result: RunResult) -> str:
    """Render the report of a run as one self-contained HTML file."""
    return Template(_asset("report.html")).substitute(
        title=html.escape(result.run_id),
        state=html.escape(result.state),
        cards=_cards(result.summary),
        facts=_facts(result),
        changes=html.escape(result.changes_toml or "unknown"),
        config=html.escape(result.config_toml),
        alarms="".join(f'<p class="alarm">{html.escape(alarm)}</p>' for alarm in result.alarms),
        notes="".join(f"<li>{html.escape(str(note))}</li>" for note in result.summary.get("notes", [])),
        policy=_policy(),
        uplot_css=_asset("uplot/uPlot.min.css"),
        css=_asset("report.css"),
        license=html.escape(_asset("uplot/LICENSE")),
        uplot=_asset(SCRIPTS[0]),
        charts=_asset(SCRIPTS[1]),
        script=_asset(SCRIPTS[2]),
        data=_packed(chart_data(result.lines)),
        time=_times(result.steps, result.summary.get("wall_seconds")),
        answers=_answers(result),
        samples=_samples_table(result.samples),
        counts=_counts(result.summary),
        steps=_steps_table(result.steps),
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy() -> str:
    """Return the page's Content-Security-Policy: its own scripts, styles and images, and nothing else."""
    digests = [base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() for name in SCRIPTS]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {scripts}; {rest}"


def _packed(data: Mapping[str, Any]) -> str:
    """Compress data for the page; base64 holds nothing that HTML could take for markup."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=6, mtime=0)).decode()


def _cards(summary: Mapping[str, Any]) -> str:
    cards = [
        (f"held-out {name}", f"{before:.2f} → {after:.2f}", f"{after - before:+.2f}")
        for name, before, after in results(summary)
    ]
    cards.append(("steps", str(summary.get("steps", "?")), ""))
    if (seconds := summary.get("wall_seconds")) is not None:
        cards.append(("wall time", f"{seconds / 60:.1f} min", f"{seconds:.0f} s"))
    return "".join(
        f'<div class="card"><div class="label">{html.escape(label)}</div><div class="value">{html.escape(value)}</div>'
        f'<div class="note">{html.escape(note)}</div></div>'
        for label, value, note in cards
    )


def _facts(result: RunResult) -> str:
    return "".join(
        f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in result.facts().items()
    )


def _times(steps: Steps, wall_seconds: float | None) -> str:
    """Render where the time went as tables; `wall_seconds` is the duration of the whole run, if known."""
    if not mean_rows(steps, TRAINER):
        return "<p>no step has ended yet</p>"
    total = sum(step.get("step_seconds") or 0.0 for step in steps)
    outside = (
        f"<p>{total:.1f} s in {len(steps)} steps, {max(0.0, wall_seconds - total):.1f} s outside of them: start, "
        "first weights, evaluations, export.</p>"
        if wall_seconds
        else ""
    )
    shares = _table(
        ("of the time of all steps", "share"), [(name, f"{value:.1%}") for name, value in share_rows(steps)]
    )
    return f'{outside}<div class="times">{_breakdown(steps, TRAINER)}{_breakdown(steps, GROUP)}{shares}</div>'


def _breakdown(steps: Steps, whole: Breakdown) -> str:
    rows = [
        f'<tr><td><i style="background:{color(whole.parts.index(part))}"></i>{html.escape(part.label)}</td>'
        f"<td>{seconds:.3f}</td><td>{share:.1%}</td></tr>"
        for part, seconds, share in mean_rows(steps, whole)
    ]
    return _rendered((whole.title, "mean s", "share"), rows) if rows else ""


def _answers(result: RunResult) -> str:
    """Render the results of evaluations, and each set's first and newest answers side by side."""
    if not result.answered_sets:
        return "<p>none</p>"
    sets = "".join(f"<h3>{html.escape(name)}</h3>{_set_answers(result, name)}" for name in result.answered_sets)
    return f"{_table(*table_of(result.set_rows))}{sets}"


def _set_answers(result: RunResult, name: str) -> str:
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
    more = f"<p>the first {SHOWN_ANSWERS}; all are in evaluations/</p>" if len(newest) > SHOWN_ANSWERS else ""
    return more + _table(head, rows)


def _answer_cells(answer: Mapping[str, Any] | None) -> list[str]:
    if answer is None:
        return ["", ""]
    return [shown_text(answer.get("response", "")), answer["error"] or f"{answer['reward']:.2f}"]


def shown_text(value: object) -> str:
    """Return a model's text without the height of what is empty: at most one blank line between two others."""
    text = str(value)
    if text and all(character.isspace() or unicodedata.category(character) in INVISIBLE for character in text):
        return f"(only {len(text)} blank characters)"
    return re.sub(r"\s*\n\s*\n", "\n\n", text.strip("\r\n\v\f"))


def _counts(summary: Mapping[str, Any]) -> str:
    rows = [(name, summary.get(name)) for name in ("published", "trained", "dropped", "in_flight")]
    reasons = summary.get("dropped_by_reason") or {}
    rows += [(f"dropped: {reason}", count) for reason, count in sorted(reasons.items())]
    return _table(("groups", ""), [(name, "?" if count is None else str(count)) for name, count in rows])


def _steps_table(steps: Steps) -> str:
    shown = steps[-SHOWN_STEPS:]
    columns = [column for column in STEP_COLUMNS if any(step.get(column[1]) is not None for step in shown)]
    rows = [
        ["" if step.get(name) is None else style.format(step[name]) for _, name, style in columns] for step in shown
    ]
    more = (
        f"<p>the newest {SHOWN_STEPS} of {len(steps)}; all are in metrics.jsonl</p>" if len(steps) > SHOWN_STEPS else ""
    )
    return more + _table([title for title, _, _ in columns], rows)


def _samples_table(samples: Sequence[Mapping[str, Any]]) -> str:
    head = ("step", "version", "prompt", "response", "answer", "reward", "advantage")
    rows = []
    for sample in samples:
        prompt = _cell(shown_text(sample.get("prompt", "")), "".join(map(_picture, sample.get("media", ()))))
        rest = (
            _response(sample) or "(nothing)",
            shown_text(sample.get("answer", "")),
            f"{float(sample.get('reward', 0.0)):.2f}",
            f"{float(sample.get('advantage', 0.0)):+.2f}",
        )
        before = (str(sample.get("step", "")), str(sample.get("version", 0)))
        rows.append(f"<tr>{''.join(map(_cell, before))}{prompt}{''.join(map(_cell, rest))}</tr>")
    return _rendered(head, rows) if rows else "<p>none</p>"


def _picture(item: Mapping[str, Any]) -> str:
    """Render an image of a sample, or what is known of it if it has no thumbnail."""
    line, thumbnail = html.escape(media_line(item)), str(item.get("thumbnail", ""))
    if not thumbnail.startswith(THUMBNAIL_URI):
        return f"<br>{line}"
    return f'<br><img src="{html.escape(thumbnail)}" alt="{line}" title="{line}">'


def _response(sample: Mapping[str, Any]) -> str:
    """Return a sample's conversation, message by message, or its answer."""
    return "\n".join(map(shown_text, conversation_lines(sample))) or shown_text(sample.get("response", ""))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return "<p>none</p>"
    return _rendered(head, [f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows])


def _cell(text: str, markup: str = "") -> str:
    return f"<td>{html.escape(text)}{markup}</td>"


def _rendered(head: Sequence[str], rows: Sequence[str]) -> str:
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
