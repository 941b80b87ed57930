from datetime import UTC, datetime, timedelta

from services.coordinator.runs.ending import Retention
from services.coordinator.state.records import Phase, RunRecord

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
