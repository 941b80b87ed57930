"""The data of report.html: the answers for its views, as JSON, with the fields of the console's server."""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from relaxd.client.folder_runs import read_sample
from relaxd.report.charts import color
from relaxd.report.group_outcomes import outcome_message, read_fates
from relaxd.report.run_result import RunResult, place_of, results, table_of
from relaxd.report.step_times import GROUP, TRAINER, Breakdown, Steps, mean_rows, share_rows
from relaxd.rpc.message_parts import plain

SHOWN_STEPS = 100
"""Maximum number of steps in the table, the newest; charts show all steps."""
SHOWN_ANSWERS = 100
"""Maximum number of answers in the table of a set."""
SHOWN_GROUPS = 200
"""Maximum number of groups in the ledger, the newest."""
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
"""Unicode categories of invisible characters."""
TEXTS = ("prompt", "response", "answer")
"""Fields of samples that may be long and blank."""


def report_data(result: RunResult) -> dict[str, Any]:
    """Return the run, and the answers to the views' requests by name, without the charts."""
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
    """Return the results of evaluations, and each set's first and newest answers side by side."""
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
    """Return a model's text with at most one blank line in a row."""
    text = str(value)
    if text and all(character.isspace() or unicodedata.category(character) in INVISIBLE for character in text):
        return f"(only {len(text)} blank characters)"
    return re.sub(r"\s*\n\s*\n", "\n\n", text.strip("\r\n\v\f"))
