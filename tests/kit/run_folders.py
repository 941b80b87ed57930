"""Folders of runs, as the coordinator writes them."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from relaxd.board import Counts
from relaxd.config import RunConfig
from relaxd.config.load_toml import load
from relaxd.config.run import TelemetryConfig
from services.coordinator.runs.run_files import RunFiles, summarise
from services.coordinator.state.records import Phase, RunRecord

CONFIG = """
run.steps = {steps}
model.path = "nothing"
data.source = "addition"
reward.name = "addition"
"""
COUNTS = Counts(
    published=9,
    trained=8,
    dropped=1,
    open=0,
    last_step=2,
    dropped_by_reason={},
    consecutive_drops=0,
    consecutive_filtered=0,
)
BEGAN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def write_run(
    run_id: str,
    *,
    steps: int,
    done: int,
    age: int = 0,
    telemetry: Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
    **record: object,
) -> Path:
    """Write the folder of a run below runs/, as the coordinator does; each step has two samples.

    `age` is its age in days, `telemetry` that section of its configuration, `record` fields of its record. `config` is
    another configuration than that of this module.
    """
    config = config or load(CONFIG.format(steps=steps))
    if telemetry is not None:
        config = config.model_copy(update={"telemetry": TelemetryConfig(**telemetry)})
    folder = Path("runs") / run_id
    files = RunFiles(folder)
    files.create(CONFIG.format(steps=steps), config)
    began = BEGAN - timedelta(days=age)
    fields = {"phase": Phase.RUNNING, "create_time": began} | record
    if "outcome" in record:
        fields |= {"phase": Phase.STOPPED, "end_time": began + timedelta(seconds=90)}
    written = RunRecord(run_id=run_id, config_json=config.model_dump_json(), folder=str(folder.resolve()), **fields)
    files.write_record(written)
    files.take_over_steps(lambda after, limit: [], lambda: None, ())
    files.metrics.append((step, {"reward_mean": step / 10, "loss": 0.5}) for step in range(1, done + 1))
    files.append_samples(
        {"step": step, "prompt": f"prompt {step}", "response": f"answer {step}{letter}", "reward": 0.5}
        for step in range(1, done + 1)
        for letter in "ab"
    )
    files.close()
    (folder / "ledger.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, done + 1)))
    if written.phase.ended:
        files.write_summary(summarise(written, COUNTS, "model"))
    return folder
