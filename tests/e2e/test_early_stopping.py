"""A run that ends early, because its evaluations no longer improve."""

import pytest

from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import read_summary
from tests.kit.reports import read_report

METRIC = "eval.held_out.unscored"  # always 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_ends_as_completed_when_evaluations_no_longer_improve(workplace: Workplace) -> None:
    settings = ("--run.steps", "60", "--eval.interval", "1", "--board.max_staleness", "0")
    stop = ("--run.stop_early.metric", METRIC, "--run.stop_early.patience", "2")
    code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "r", *settings, *stop)
    assert code == 0, output
    folder = workplace.folder / "runs" / "r"
    summary = read_summary(folder)
    assert summary["outcome"] == "completed"
    assert 3 <= summary["steps"] < 60
    reason = f"completed early: {METRIC} has not improved in 2 evaluations, up to step "
    assert str(summary["reason"]).startswith(reason)
    assert reason in read_report(folder / "report.html")["run"]["reason"]
    assert (folder / "model" / "config.json").is_file()
    for command in ("runs", "status"):
        code, output = workplace.relaxd(command)
        assert code == 0, output
        assert f"r {reason}" in output
