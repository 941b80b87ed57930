"""A replica without contact to the coordinator leaves its GPU in time. No GPU is needed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.chaos.proxy import Link, Loop
from tests.integration.coordinator.cluster import GPU_LEASE_SECONDS, LEASE_SECONDS, Cluster
from tests.integration.coordinator.fleet_kit import holders
from tests.integration.coordinator.gpu_holder import GPU
from tests.kit.ports import free_port
from tests.kit.processes import is_alive
from tests.kit.tokenizer import write_tokenizer

HELD = [GPU.uuid]


class Holders(Cluster):
    """Replicas that compete for one GPU; the first is behind a link that can be cut."""

    def __init__(self, folder: Path, redis_url: str, loop: Loop) -> None:
        super().__init__(folder, redis_url, write_tokenizer(folder / "model"))
        self.children = folder / "children"
        self.children.mkdir()
        self.loop = loop
        self.link = Link("first to coordinator", free_port(), self.port)
        loop.do(self.link.start())

    def hold(self, name: str, port: int) -> None:
        self.start(
            name,
            "tests.integration.coordinator.gpu_holder",
            *("--coordinator", f"127.0.0.1:{port}"),
            HOLDER_FOLDER=str(self.children),
        )

    def until_held(self, name: str) -> psutil.Process:
        """Wait until a replica has the GPU and a child on it."""
        self.until(f"{name} has the GPU", lambda: holders(self).get(name) == HELD)
        return self.until(f"a child of {name}", lambda: self.living(name))

    def living(self, name: str) -> psutil.Process | None:
        pids = [int(path.name.partition("-")[0]) for path in self.children.glob(f"*-{name}")]
        return next((psutil.Process(pid) for pid in pids if is_alive(pid)), None)

    def nobody_met(self) -> None:
        assert not (self.children / "conflict").exists(), (self.children / "conflict").read_text()


@pytest.fixture
def cluster(tmp_path: Path, redis_url: str, request: pytest.FixtureRequest) -> Iterator[Holders]:
    """A run whose first replica is behind a relay; a parameter is the lease of its GPU in seconds."""
    with Loop() as loop:
        cluster = Holders(tmp_path, redis_url, loop)
        cluster.gpu_lease_seconds = getattr(request, "param", GPU_LEASE_SECONDS)
        cluster.coordinator()
        cluster.hold("first", cluster.link.port)
        cluster.start_when_up("run")
        yield cluster
        cluster.close()


def test_a_replica_that_is_cut_off_ends_its_child_before_another_gets_the_gpu(cluster: Holders) -> None:
    child = cluster.until_held("first")
    cluster.hold("second", cluster.port)
    cluster.until("second waits", lambda: "first holds" in cluster.log("second"))
    cluster.loop.do(cluster.link.drop())
    cluster.until("the first one's child is gone", lambda: not is_alive(child.pid))
    cluster.until("its reason", lambda: "no heartbeat was answered in time" in cluster.log("first"))
    cluster.until_held("second")
    cluster.nobody_met()  # the second one looked when it was granted the GPU: no clock of a busy test does as well

    # It is still there, and works as soon as it can: it is heard again, and the GPU is free.
    cluster.loop.do(cluster.link.restore())
    cluster.until("the first one is back", lambda: holders(cluster).get("first") == [])
    process = cluster.processes.pop("second")
    process.terminate()
    assert process.wait(timeout=60) == 0
    cluster.until_held("first")
    cluster.nobody_met()


@pytest.mark.slow
def test_a_replica_that_stands_still_has_no_child_any_more_when_it_wakes_up(cluster: Holders) -> None:
    child = cluster.until_held("first")
    cluster.send("first", signal.SIGSTOP)
    cluster.hold("second", cluster.port)
    cluster.until_held("second")
    assert not is_alive(child.pid)
    cluster.send("first", signal.SIGCONT)
    cluster.until("the first one is back", lambda: holders(cluster).get("first") == [])
    assert cluster.living("first") is None
    cluster.nobody_met()


@pytest.mark.slow
def test_a_stopped_child_does_not_keep_the_gpu(cluster: Holders) -> None:
    child = cluster.until_held("first")
    os.kill(child.pid, signal.SIGSTOP)
    cluster.loop.do(cluster.link.cut())
    cluster.hold("second", cluster.port)
    cluster.until_held("second")
    cluster.nobody_met()


# The lease leaves a coordinator time to start, on a busy machine too.
@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2.5 * GPU_LEASE_SECONDS], indirect=True, ids=["long lease"])
def test_a_coordinator_that_is_away_for_less_than_the_lease_costs_nobody_a_child(cluster: Holders) -> None:
    child = cluster.until_held("first")
    cluster.kill("coordinator")
    killed = time.monotonic()
    time.sleep(LEASE_SECONDS + 1.0)
    cluster.coordinator()
    cluster.until("it is known again", lambda: holders(cluster).get("first") == HELD)
    time.sleep(max(0.0, killed + cluster.gpu_lease_seconds + 1.0 - time.monotonic()))
    assert cluster.living("first") == child
    assert "no heartbeat was answered in time" not in cluster.log("first")
