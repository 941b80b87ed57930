"""The files that the coordinator writes into a run's folder.

run.json and ledger.jsonl are copies of what is in Redis: with them, the trainer's checkpoints and its step files a run
goes on when Redis has lost everything (see `restoring`).
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relaxd.board import Counts, LedgerEntry
from relaxd.config import RunConfig
from services.coordinator.state.records import Evaluation, RunRecord

RECORD, LEDGER = "run.json", "ledger.jsonl"

Steps = Iterable[tuple[int, Mapping[str, float]]]
"""(step, metrics), in order."""


class RunFiles:
    """config.json, config.toml, run.json, ledger.jsonl, metrics.jsonl and summary.json of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last_step = 0
        """The last step in metrics.jsonl."""

    def create(self, config_toml: str, config: RunConfig) -> None:
        """Make the folder and keep the configuration. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(config_toml)
        (self.folder / "config.json").write_text(config.model_dump_json(indent=2) + "\n")

    def rewrite_metrics(self, steps: Steps, evaluations: Iterable[Evaluation]) -> None:
        """Write metrics.jsonl anew: a line per step, with the evaluation of that step in it, and one for step 0.

        Done when an evaluation comes in, and after a restart: the file may then end in half a line. What the
        coordinator itself had seen of a step is nowhere but in the file, and stays.
        """
        before = self._read_metrics()
        lines: dict[int, dict[str, Any]] = {
            step: {**before.get(step, {}), "step": step, **metrics} for step, metrics in steps
        }
        for evaluation in evaluations:
            lines.setdefault(evaluation.step, {"step": evaluation.step}).update(evaluation.metrics)
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / "metrics.jsonl", "".join(_line(lines[step]) for step in sorted(lines)))
        self.last_step = max(lines, default=0)

    def write_record(self, record: RunRecord) -> None:
        """Write run.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / RECORD, record.model_dump_json(indent=2) + "\n")

    def rewrite_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        """Write ledger.jsonl anew; done after a restart, as the file may then end in half a line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / LEDGER, "".join(json.dumps(asdict(entry)) + "\n" for entry in entries))

    def append_ledger(self, entries: Iterable[LedgerEntry]) -> None:
        """Add the lines of new steps to ledger.jsonl."""
        with (self.folder / LEDGER).open("a") as file:
            file.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)

    def append_metrics(self, steps: Steps) -> None:
        """Add the lines of new steps."""
        with (self.folder / "metrics.jsonl").open("a") as file:
            for step, metrics in steps:
                file.write(_line({"step": step, **metrics}))
                self.last_step = step

    def _read_metrics(self) -> dict[int, dict[str, Any]]:
        """The lines of metrics.jsonl that are whole, by step."""
        path = self.folder / "metrics.jsonl"
        lines: dict[int, dict[str, Any]] = {}
        for text in path.read_text().splitlines() if path.is_file() else ():
            try:
                line = json.loads(text)
            except ValueError:  # half a line: the coordinator died while it wrote
                continue
            lines[line["step"]] = line
        return lines

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        _replace(self.folder / "summary.json", json.dumps(_finite(summary), indent=2) + "\n")


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(_finite(values)) + "\n"


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has neither NaN nor infinity: such a number becomes null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def summarise(record: RunRecord, counts: Counts, model: str, ledger: Sequence[LedgerEntry] = ()) -> dict[str, Any]:
    """The content of summary.json; `ledger` is that of a colocated run."""
    before = next((e.metrics for e in record.evaluations if e.step == 0), {})
    after = next((e.metrics for e in reversed(record.evaluations) if e.step > 0), {})
    assert record.end_time is not None
    return {
        "run_id": record.run_id,
        "state": record.phase.value.lower(),
        "reason": record.reason,
        "accuracy_before": before.get("eval_accuracy"),
        "accuracy_after": after.get("eval_accuracy"),
        "format_before": before.get("eval_format"),
        "format_after": after.get("eval_format"),
        "steps": counts.last_step,
        "wall_seconds": round((record.end_time - record.create_time).total_seconds(), 3),
        "published": counts.published,
        "trained": counts.trained,
        "dropped": counts.dropped,
        "dropped_by_reason": counts.dropped_by_reason,
        "in_flight": counts.open,
        "started": record.create_time.isoformat(),
        "ended": record.end_time.isoformat(),
        "model": model,
        "evaluations": [{"step": e.step, **e.metrics} for e in record.evaluations],
        "notes": list(record.notes),
        **({"switching": switching([entry.metrics for entry in ledger])} if ledger else {}),
    }


def switching(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What changing turns took in a colocated run: seconds in all, their share of all steps, and per step by part; and
    the bytes in use on the devices that the last steps saw, awake and asleep."""
    told = [metrics for metrics in steps if "switch_seconds" in metrics]
    total = sum(metrics["switch_seconds"] for metrics in told)
    elapsed = sum(metrics.get("step_seconds", 0.0) for metrics in steps)
    names = sorted({name for metrics in told for name in metrics if name.startswith("switch_")})
    means = {name: sum(metrics.get(name, 0.0) for metrics in told) / len(told) for name in names}
    memory = {
        name: metrics[name] for metrics in told for name in metrics if name.endswith(("_awake_bytes", "_asleep_bytes"))
    }
    return {"seconds": total, "share": total / elapsed if elapsed else 0.0, **means, **memory}
