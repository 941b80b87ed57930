"""GPU leases: no GPU has two holders, under concurrent requests, deaths and restarts. No GPU is needed."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import StringIO

import grpc
import pytest
from rich.console import Console

from relaxd import PROTOCOL_VERSION
from relaxd.cli.reading.status_command import print_status
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.roles import JUDGE, ROLLOUT
from relaxd.rpc.errors import field_violations
from relaxd.v1 import coordinator_pb2 as pb
from tests.integration.coordinator.cluster import LEASE_SECONDS, Cluster
from tests.integration.coordinator.fleet_kit import holders

GPUS = [f"GPU-{number}2345678-d72c-4106-c12f-20bd9faed9f6" for number in range(4)]


def register(cluster: Cluster, *replica_ids: str, role: str = ROLLOUT) -> None:
    for replica_id in replica_ids:
        cluster.stub.Register(
            pb.RegisterRequest(
                registration=pb.Registration(
                    replica_id=replica_id, role=role, address="127.0.0.1:9", protocol_version=PROTOCOL_VERSION
                )
            ),
            timeout=5,
        )


def lease(cluster: Cluster, replica_id: str, count: int, candidates: list[str] = GPUS, share: float = 0.0) -> list[str]:
    request = pb.LeaseGpusRequest(replica_id=replica_id, candidate_uuids=candidates, count=count, share=share)
    return list(cluster.stub.LeaseGpus(request, timeout=5).gpu_uuids)


def lease_or_error(cluster: Cluster, replica_id: str) -> list[str] | grpc.RpcError:
    try:
        return lease(cluster, replica_id, 1)
    except grpc.RpcError as error:
        return error


def refusal(call: Callable[[], object]) -> grpc.RpcError:
    try:
        answer = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"not refused: {answer}")


@contextmanager
def beating(cluster: Cluster, *replica_ids: str) -> Iterator[None]:
    """Send the replicas' heartbeats in the background; they fail while the coordinator is away."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(LEASE_SECONDS / 6):
            for replica_id in replica_ids:
                try:
                    cluster.stub.Heartbeat(pb.HeartbeatRequest(replica_id=replica_id), timeout=1)
                except grpc.RpcError as error:
                    if error.code() == grpc.StatusCode.NOT_FOUND:
                        raise

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_replicas_that_ask_at_once_get_different_gpus(cluster: Cluster) -> None:
    cluster.until("up", lambda: holders(cluster) == {})
    names = [f"rollout-{number}" for number in range(8)]
    register(cluster, *names)
    with beating(cluster, *names):
        for _ in range(5):
            together = threading.Barrier(len(names))

            def ask(name: str, together: threading.Barrier = together) -> list[str] | grpc.RpcError:
                together.wait(timeout=60)
                return lease_or_error(cluster, name)

            with ThreadPoolExecutor(len(names)) as pool:
                answers = dict(zip(names, pool.map(ask, names), strict=True))
            granted = {name: answer for name, answer in answers.items() if isinstance(answer, list)}
            assert sorted(uuid for uuids in granted.values() for uuid in uuids) == sorted(GPUS)
            assert holders(cluster) == {name: granted.get(name, []) for name in names}
            for name in names:
                if name in granted:
                    assert lease(cluster, name, 1) == granted[name]  # asked again: the answer was lost
                else:
                    error = answers[name]
                    assert isinstance(error, grpc.RpcError)
                    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert f"{name} needs 1 GPU and sees 4, of which 0 are available" in error.details()
                    for holder, (uuid,) in granted.items():
                        assert f"{holder} holds {uuid}" in error.details()
            for name in granted:
                assert lease(cluster, name, 0) == []
        assert not any(holders(cluster).values())


def test_what_is_asked_for_is_checked_and_can_change(cluster: Cluster) -> None:
    cluster.until("up", lambda: holders(cluster) == {})
    error = refusal(lambda: lease(cluster, "", -1, ["0", GPUS[0], GPUS[0]], share=1.5))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert {field for field, _ in field_violations(error)} == {
        *("replica_id", "count", "share", "candidate_uuids[0]", "candidate_uuids")
    }
    assert refusal(lambda: lease(cluster, "trainer", 1)).code() == grpc.StatusCode.NOT_FOUND

    register(cluster, "trainer", "rollout")
    with beating(cluster, "trainer", "rollout"):
        assert lease(cluster, "trainer", 2) == GPUS[:2]
        assert lease(cluster, "rollout", 1) == GPUS[2:3]
        # What nobody else has goes with what it has, in the order of NVML; what it doesn't name any more is freed.
        assert lease(cluster, "trainer", 3) == [GPUS[0], GPUS[1], GPUS[3]]
        assert lease(cluster, "trainer", 1, GPUS[3:]) == GPUS[3:]
        # Too many: nothing changes.
        error = refusal(lambda: lease(cluster, "rollout", 4))
        assert "rollout needs 4 GPUs and sees 4, of which 3 are available: trainer holds " + GPUS[3] in error.details()
        assert (
            "sees 1, of which 1 are available. Stop"
            in refusal(lambda: lease(cluster, "rollout", 2, GPUS[:1])).details()
        )
        assert holders(cluster) == {"rollout": GPUS[2:3], "trainer": GPUS[3:]}
        console = Console(file=(text := StringIO()), width=240)
        with CoordinatorClient(f"127.0.0.1:{cluster.port}") as coordinator:
            print_status(coordinator, None, console)
        (line,) = [line for line in text.getvalue().splitlines() if line.split()[:1] == ["trainer"]]
        assert GPUS[3][:12] in line
        # A judge and an engine have shares of a GPU, as the status says.
        register(cluster, "judge", role=JUDGE)
        with beating(cluster, "judge"):
            assert lease(cluster, "rollout", 1, GPUS[2:3], share=0.75) == GPUS[2:3]
            assert "trainer holds" in refusal(lambda: lease(cluster, "judge", 1, GPUS[3:], share=0.25)).details()
            assert lease(cluster, "judge", 1, share=0.25) == GPUS[2:3]
            console = Console(file=(text := StringIO()), width=240)
            with CoordinatorClient(f"127.0.0.1:{cluster.port}") as coordinator:
                print_status(coordinator, None, console)
            assert f"0.25 of {GPUS[2][:12]}" in text.getvalue()
            assert f"0.75 of {GPUS[2][:12]}" in text.getvalue()
            assert lease(cluster, "judge", 0) == []
            assert lease(cluster, "rollout", 1, GPUS[2:3]) == GPUS[2:3]
        # A process that starts anew under its name has what the dead one had, until it asks for something else.
        register(cluster, "rollout")
        assert holders(cluster)["rollout"] == GPUS[2:3]


@pytest.mark.slow
def test_leases_outlive_the_coordinator_and_not_the_replica(cluster: Cluster) -> None:
    cluster.until("up", lambda: holders(cluster) == {})
    register(cluster, "alive", "dead")
    alive, dead = lease(cluster, "alive", 2), lease(cluster, "dead", 2)
    with beating(cluster, "alive"):
        cluster.kill("coordinator")
        cluster.coordinator()
        # The dead one may be gone before this looks, as its lease as a replica is short: its GPUs are still its own.
        cluster.until("up", lambda: holders(cluster).get("alive") == alive)
        register(cluster, "next")
        with beating(cluster, "next"):
            assert "dead holds" in refusal(lambda: lease(cluster, "next", 1)).details()
            cluster.until("the dead one is gone", lambda: holders(cluster) == {"alive": alive, "next": []})
            assert cluster.until("its GPUs are back", lambda: lease(cluster, "next", 2)) == dead
            assert lease(cluster, "alive", 2) == alive
            # It was not dead: it comes back, and what it had is another's now.
            register(cluster, "dead")
            assert "next holds" in refusal(lambda: lease(cluster, "dead", 2)).details()
