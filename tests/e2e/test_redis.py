"""Redis dies in the middle of a run, comes back with its append-only file or is replaced, and the run goes on."""

import os
import re
import signal

import pytest

from relaxd.local.state_folder import StateFolder
from relaxd.redis_client import COORDINATOR
from relaxd.redis_client.lookups import slot_of
from tests.e2e.conftest import Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.redis.clusters import SHARE, ClusterServers
from tests.kit.redis.redis_server import await_append_only_file


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_survives_the_death_of_redis(workplace: Workplace) -> None:
    process = workplace.start("run", "tiny.toml", "--run-id", "redis", "--run.steps", "6")
    state = StateFolder(workplace.folder / ".relaxd")
    assert process.stdout is not None
    output, killed = [], False
    for line in process.stdout:
        output.append(line)
        if re.match(r"step +2/6", line):
            stack = state.read()
            await_append_only_file(stack.redis)
            os.kill(next(s.pid for s in stack.services if s.role == "redis"), signal.SIGKILL)
            killed = True
    assert process.wait(timeout=60) == 0, "".join(output)
    assert killed
    folder = workplace.folder / "runs" / "redis"
    check_books(read_summary(folder), steps=6)
    assert "restarted trainer" not in (folder / "logs" / "supervisor.log").read_text()


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_run_on_a_cluster_survives_the_primary_of_its_slot(workplace: Workplace) -> None:
    run_id = next(
        f"run-{number}" for number in range(9) if slot_of(f"run-{number}") // SHARE != slot_of(COORDINATOR) // SHARE
    )
    cluster = ClusterServers(workplace.folder, replicated=(run_id, COORDINATOR))
    try:
        cluster.start()
        assert cluster.owner(run_id) is not cluster.owner(COORDINATOR)
        words = ("run", "tiny.toml", "--run-id", run_id, "--run.steps", "6")
        process = workplace.start(*words, REDIS_URL=cluster.url)
        assert process.stdout is not None
        output, killed = [], False
        for line in process.stdout:
            output.append(line)
            if re.match(r"step +2/6", line):
                dead = cluster.kill_primary()
                cluster.await_promotion(dead)
                cluster.revive()
                killed = True
        assert process.wait(timeout=60) == 0, "".join(output)
        assert killed
    finally:
        cluster.stop()
    folder = workplace.folder / "runs" / run_id
    check_books(read_summary(folder), steps=6)
    assert "restarted trainer" not in (folder / "logs" / "supervisor.log").read_text()
