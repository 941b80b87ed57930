"""A run with a rule, a reward that tells people something, and an address: the run shows both alarms, and the address
gets messages about them and the end.
"""

from pathlib import Path

import pytest

from relaxd.report.run_result import read_result
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import Cluster
from tests.kit.webhook import webhook

pytest.importorskip("apprise", reason="pip install relaxd[alerts]")
RULE = "reward_mean > -1 over 2 steps"
REWARD = """
import relaxd

def score(sample):
    relaxd.notify("no quota is left")
    return 1.0
"""


def test_an_alarm_of_a_rule_is_shown_and_told(cluster: Cluster, tmp_path: Path) -> None:
    with webhook() as server:
        urls = tmp_path / "urls"
        urls.write_text(server.url)
        cluster.judges()
        cluster.trainer(PEER_STEP_SECONDS="0.2")
        cluster.rollout("rollout")
        alerts = {"alerts__rules": [RULE], "alerts__urls_file": str(urls), "alerts__min_free_gb": 0.0}
        (tmp_path / "telling.py").write_text(REWARD)
        cluster.start_when_up("run", run__steps=10_000, reward__name=f"{tmp_path}/telling.py:score", **alerts)
        run = cluster.until("both alarms", lambda: len((run := cluster.run()).alarms) == 2 and run)
        alarms = {alarm.kind: alarm for alarm in run.alarms}
        assert (alarms[pb.ALARM_KIND_METRIC].name, alarms[pb.ALARM_KIND_METRIC].first_step) == (RULE, 2)
        assert alarms[pb.ALARM_KIND_USER].text == "the run's own code says: no quota is left"
        cluster.until("messages about both", lambda: all(one in str(server.posted) for one in (RULE, "no quota")))
        cluster.stub.StopRun(pb.StopRunRequest(run_id="run", reason="seen enough"), timeout=20)
        run = cluster.until_state(pb.RUN_STATE_STOPPED)
        cluster.until("the end", lambda: "run run has ended" in str(server.posted))
    assert "run run begins" in str(server.posted)  # alone, or together with the alarm
    assert f"alerts.rules: {RULE}" in str(server.posted)
    assert any(RULE in one for one in read_result(Path(run.folder)).alarms)
    assert "hunter2" not in cluster.log("coordinator")
