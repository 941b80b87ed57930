"""GPU leases with real GPUs: replicas that all see two of them, each with a child that uses what was leased."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaxd.replica.gpus import visible_gpus
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED, REPLICA_STATE_READY
from tests.integration.coordinator.cluster import GPU_LEASE_SECONDS, Cluster
from tests.kit.processes import is_alive
from tests.kit.tokenizer import write_tokenizer

GIGABYTE = 1 << 30


@pytest.fixture
def cluster(tmp_path: Path, redis_url: str) -> Iterator[Cluster]:
    """A coordinator with a run that waits for its replicas."""
    cluster = Cluster(tmp_path, redis_url, write_tokenizer(tmp_path / "model"))
    cluster.coordinator()
    cluster.start_when_up("run")
    yield cluster
    cluster.close()


def replicas(cluster: Cluster) -> dict[str, pb.RegisteredReplica]:
    found = cluster.stub.ListReplicas(pb.ListReplicasRequest(), timeout=5).replicas
    return {replica.registration.replica_id: replica for replica in found}


def start_holder(cluster: Cluster, name: str, gpus: str) -> None:
    cluster.start(
        name,
        "tests.gpu.gpu_holder",
        *("--coordinator", f"127.0.0.1:{cluster.port}"),
        CUDA_VISIBLE_DEVICES=gpus,
        HOLDER_FILE=str(cluster.folder / f"{name}.gpus"),
    )


def ready(cluster: Cluster, name: str) -> pb.RegisteredReplica:
    """Wait until a holder's child has its GPU, and check that it is the leased one."""
    replica = cluster.until(
        f"{name} is ready",
        lambda: (found := replicas(cluster).get(name)) and found.status.state == REPLICA_STATE_READY and found,
        60,
    )
    (leased,) = replica.leased_gpu_uuids
    assert list(replica.status.gpu_uuids) == [leased]
    assert json.loads((cluster.folder / f"{name}.gpus").read_text()) == [leased.removeprefix("GPU-")]
    assert replica.status.gauges["gpu_memory_bytes"] > GIGABYTE
    assert 0 <= replica.status.gauges["gpu_utilisation"] <= 1
    return replica


@pytest.mark.gpu(2)
def test_replicas_take_different_gpus_and_a_dead_one_gives_its_back(
    cluster: Cluster, facts: Callable[[str, object], None]
) -> None:
    both = [gpu.uuid for gpu in visible_gpus()][:2]
    for name, order in (("one", both), ("two", both[::-1])):
        start_holder(cluster, name, ",".join(order))
    first, second = ready(cluster, "one"), ready(cluster, "two")
    assert {*first.leased_gpu_uuids, *second.leased_gpu_uuids} == set(both)
    assert set(first.registration.gpu_uuids) == set(both)

    start_holder(cluster, "late", ",".join(both))
    late = cluster.until(
        "the late one says why it can't start",
        lambda: (
            (found := replicas(cluster).get("late")) and found.status.state == REPLICA_STATE_FAILED and found.status
        ),
    )
    assert "late needs 1 GPU and sees 2, of which 0 are available" in late.detail
    assert f"one holds {first.leased_gpu_uuids[0]}" in late.detail

    cluster.kill("one")
    begun = time.monotonic()
    assert ready(cluster, "late").leased_gpu_uuids == first.leased_gpu_uuids
    facts("back_after_a_kill_seconds", time.monotonic() - begun)
    assert time.monotonic() - begun < GPU_LEASE_SECONDS + 40  # it is tried again after up to 8 s, and torch is imported

    # One that is asked to end gives its GPU back at once.
    process = cluster.processes.pop("two")
    process.terminate()
    assert process.wait(timeout=20) == 0
    assert not replicas(cluster)["two"].leased_gpu_uuids
    start_holder(cluster, "next", ",".join(both))
    assert ready(cluster, "next").leased_gpu_uuids == second.leased_gpu_uuids

    # One that is frozen loses its child first, and then its GPU to another one, as it says when it wakes up.
    child = int(replicas(cluster)["late"].status.detail)
    cluster.send("late", signal.SIGSTOP)
    start_holder(cluster, "heir", ",".join(both))
    assert ready(cluster, "heir").leased_gpu_uuids == first.leased_gpu_uuids
    assert not is_alive(child)
    cluster.send("late", signal.SIGCONT)
    cluster.until(
        "the late one says who has its GPU",
        lambda: (
            f"heir holds {first.leased_gpu_uuids[0]}" in replicas(cluster)["late"].status.detail
            if "late" in replicas(cluster)
            else None
        ),
    )

    # One that is drained gives its GPU back and stays.
    cluster.stub.DrainReplica(pb.DrainReplicaRequest(replica_id="next"), timeout=20)
    cluster.until("it is back", lambda: not replicas(cluster)["next"].leased_gpu_uuids)
