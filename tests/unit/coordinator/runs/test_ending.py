"""When a run ends early, and how long ended runs stay in Redis."""

from datetime import UTC, datetime, timedelta

from relaxd.config.run import StopEarlyConfig
from services.coordinator.runs.ending import Retention, reason_to_stop_early
from services.coordinator.state.records import Evaluation, Phase, RunRecord
from tests.kit.cases import each

METRIC = "eval.held_out.reward"


@each(
    ("settings", "values", "since", "reason"),
    [
        ({"patience": 2}, [0.1, 0.2, 0.2, 0.15], 0, "in 2 evaluations, up to step 4, since 0.2 at step 2"),
        ({"patience": 2}, [0.1, 0.2, 0.15, 0.3], 0, ""),
        ({"patience": 2}, [0.1, 0.2, 0.15, 0.1, 0.9], 0, "up to step 4, since 0.2 at step 2"),  # it stays
        ({"patience": 1}, [0.5], 0, ""),
        ({"patience": 1}, [], 0, ""),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.19], 0, "not improved by more than 0.1 in 2 evaluations"),
        ({"patience": 2, "min_delta": 0.1}, [0.1, 0.15, 0.25], 0, ""),
        ({"patience": 2, "metric": "-" + METRIC}, [0.1, 0.2, 0.3], 0, "since 0.1 at step 1"),
        ({"patience": 2}, [0.3, 0.2, 0.1], 3, ""),  # extended after step 3
        ({"patience": 2}, [0.3, 0.2, 0.1, 0.1, 0.2], 3, "in 2 evaluations, up to step 5, since 0.3 at step 1"),
        ({"metric": ""}, [0.3, 0.2, 0.1, 0.1, 0.2], 0, ""),
    ],
)
def test_run_ends_after_patience_is_exhausted(
    settings: dict[str, float | str], values: list[float], since: int, reason: str
) -> None:
    evaluations = [Evaluation(step=step, metrics={"eval_reward": value}) for step, value in enumerate(values, 1)]
    initial = Evaluation(step=0, metrics={"eval_reward": 0.9})
    given = StopEarlyConfig.model_validate({"metric": METRIC} | settings)
    found = reason_to_stop_early(given, [initial, *evaluations], since)
    assert reason in found
    assert bool(reason) == bool(found)


NOW = datetime(2026, 6, 1, tzinfo=UTC)


def run(name: str, days_ago: float, phase: Phase = Phase.STOPPED) -> RunRecord:
    ended = NOW - timedelta(days=days_ago)
    return RunRecord(run_id=name, config_json="{}", folder="/", phase=phase, create_time=ended, end_time=ended)


def test_runs_expire_by_number_bytes_and_age() -> None:
    runs = [(run("active", 0, Phase.RUNNING), 500), *((run(f"{days} days", days), 100) for days in (1, 2, 3, 40))]
    assert Retention(10, 10_000, 30).expired(runs, NOW) == ["40 days"]
    assert Retention(2, 10_000, 100).expired(runs, NOW) == ["3 days", "40 days"]
    assert Retention(10, 250, 100).expired(runs, NOW) == ["3 days", "40 days"]
    # The newest run stays even if it exceeds every limit.
    assert Retention(0, 0, 0).expired(runs, NOW) == ["2 days", "3 days", "40 days"]
    assert Retention(10, 10_000, 30).expired([(run("old", 90), 1 << 40)], NOW) == []
