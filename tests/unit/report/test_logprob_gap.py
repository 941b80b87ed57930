"""When a log-prob gap of engine and trainer is an alarm: the policy as a table of gaps, step by step."""

import json
from pathlib import Path
from typing import Any

from relaxd.config.load_toml import load
from relaxd.logprob_gap import GapWatch
from relaxd.report.report_files import write_report
from tests.kit.cases import each
from tests.kit.reports import read_report

NAN = float("nan")


def watch(dtype: str = "float32", engine: str = "float32") -> GapWatch:
    settings = f'rollout.dtype = "{engine}"\ntrainer.dtype = "{dtype}"\n'
    return GapWatch(
        load(f'run.steps = 1\nmodel.path = "x"\ndata.source = "addition"\nreward.name = "addition"\n{settings}')
    )


def alarms(gaps: list[float | None], **dtypes: str) -> list[int | None]:
    """Return the first step of the alarm that goes on after each step, or None."""
    watched, found = watch(**dtypes), []
    for step, gap in enumerate(gaps, 1):
        watched.observe(step, {} if gap is None else {"logprob_difference": gap})
        found.append(watched.alarm.first_step if watched.alarm is not None else None)
    return found


@each(
    ("dtypes", "gaps", "expected"),
    [
        # Below the limits of each type, and of the larger one where either side computes in bf16.
        ({}, [9e-4], [None]),
        ({}, [1.1e-3], [1]),
        ({"dtype": "bfloat16", "engine": "bfloat16"}, [0.049], [None]),
        ({"dtype": "bfloat16", "engine": "bfloat16"}, [0.051], [1]),
        ({"engine": "bfloat16"}, [0.049, 0.051, 0.051], [None, None, 3]),
        # Ten times the first steps, once there are five: two of the last three steps must be above.
        ({}, [1e-5] * 5 + [9e-5] * 3, [None] * 8),
        ({}, [1e-5] * 5 + [2e-4] * 3, [None] * 6 + [7, 7]),
        ({"dtype": "bfloat16"}, [2e-3] * 5 + [0.03] * 3, [None] * 6 + [7, 7]),
        # Rounding alone may grow tenfold, and one odd step is no alarm.
        ({}, [0.0] * 5 + [9e-6] * 3, [None] * 8),
        ({}, [1e-9] * 5 + [2e-5] * 3, [None] * 6 + [7, 7]),
        ({}, [1e-6] * 5 + [0.5, 1e-6, 1e-6], [None] * 8),
        # It ends, and another one begins. Steps without the metric change nothing.
        ({}, [1e-6] * 5 + [0.1] * 3 + [1e-6] * 2 + [0.1] * 2, [None] * 6 + [7, 7, 7, None, None, 12]),
        ({}, [0.1, None, NAN, 0.1], [1, 1, 1, 1]),
        ({}, [float("inf")], [1]),
    ],
)
def test_a_gap_is_an_alarm_above_its_limit_and_until_it_falls(
    dtypes: dict[str, str], gaps: list[float | None], expected: list[int | None]
) -> None:
    assert alarms(gaps, **dtypes) == expected


def test_the_alarm_names_gap_limit_and_what_to_look_at() -> None:
    watched = watch("bfloat16", "bfloat16")
    watched.observe(1, {"logprob_difference": 0.36})
    assert watched.alarm is not None
    assert "differ by 0.36 on average, more than 0.05 (the limit in bf16)" in watched.alarm.text
    assert "config.json" in watched.alarm.text
    assert "docs/mismatch.md" in watched.alarm.text
    watched.observe(2, {"logprob_difference": 0.1})
    assert watched.alarm.gap == 0.36  # the largest since it began
    watched = watch()
    for step, gap in enumerate([1e-5] * 5 + [5e-4] * 2, 1):
        watched.observe(step, {"logprob_difference": gap})
    assert watched.alarm is not None
    assert "by 0.0005 on average, more than 0.0001 (10 times the gap of the run's first steps)" in watched.alarm.text


def test_steps_that_are_committed_again_replace_the_old_ones() -> None:
    watched = watch()
    for step, gap in enumerate([1e-6] * 5 + [0.1] * 2, 1):
        watched.observe(step, {"logprob_difference": gap})
    assert watched.alarm is not None
    for step in (6, 7):
        watched.observe(step, {"logprob_difference": 1e-6})
    assert watched.alarm is None
    for step in (1, 2, 3, 4, 5, 6, 7):  # begun anew, with a larger usual gap
        watched.observe(step, {"logprob_difference": 5e-5 if step < 6 else 4e-4})
    assert watched.alarm is None


def test_the_report_has_every_alarm(tmp_path: Path) -> None:
    config = load('run.steps = 1\nmodel.path = "x"\ndata.source = "addition"\nreward.name = "addition"\n')
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "summary.json").write_text(json.dumps({"run_id": "r", "state": "stopped", "reason": "completed"}))
    gaps = [0.2] * 3 + [1e-6] * 3 + [0.3] * 3

    def alarms(lines: list[dict[str, Any]]) -> list[str]:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        found: list[str] = read_report(write_report(tmp_path))["answers"]["results"]["alarms"]
        return found

    found = alarms([{"step": step, "reward_mean": 0.5, "logprob_difference": gap} for step, gap in enumerate(gaps, 1)])
    text = "under equal weights the log-probs of engine and trainer differ by"
    assert [one.partition(" on average")[0] for one in found] == [
        f"steps 1 to 4: {text} 0.2",
        f"steps 8 to 9: {text} 0.3",
    ]
    assert alarms([{"step": 1, "reward_mean": 0.5, "logprob_difference": 1e-6}]) == []
