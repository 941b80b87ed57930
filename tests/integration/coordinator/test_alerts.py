"""A run with a rule and an address: the run shows the alarm, and the address gets messages about it and the end."""

from pathlib import Path

import pytest

from relaxd.report.run_result import read_result
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster
from tests.kit.webhook import webhook

pytest.importorskip("apprise", reason="pip install relaxd[alerts]")
RULE = "reward_mean > -1 over 2 steps"


def test_an_alarm_of_a_rule_is_shown_and_told(cluster: Cluster, tmp_path: Path) -> None:
    with webhook() as server:
        urls = tmp_path / "urls"
        urls.write_text(server.url)
        cluster.judges()
        cluster.trainer(PEER_STEP_SECONDS="0.2")
        cluster.rollout("rollout")
        alerts = {"alerts__rules": [RULE], "alerts__urls_file": str(urls), "alerts__min_free_gb": 0.0}
        cluster.start_when_up("run", run__steps=6, **alerts)
        run = cluster.until("the alarm", lambda: (run := cluster.run()).alarms and run)
        alarm = next(one for one in run.alarms if one.kind == pb.ALARM_KIND_METRIC)
        assert (alarm.name, alarm.first_step) == (RULE, 2)
        run = cluster.until_state(pb.RUN_STATE_STOPPED)
        cluster.until("the end", lambda: "run run has ended" in str(server.posted))
    assert "run run begins" in str(server.posted)  # alone, or together with the alarm
    assert f"alerts.rules: {RULE}" in str(server.posted)
    assert any(RULE in one for one in read_result(Path(run.folder)).alarms)
    assert "hunter2" not in cluster.log("coordinator")
