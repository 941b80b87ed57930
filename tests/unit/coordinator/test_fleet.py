"""A run's failure when the replicas of a role keep failing."""

import pytest

from relaxd.roles import REPLICA_ROLES, ROLLOUT
from relaxd.v1.coordinator_pb2 import Registration
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_FAILED,
    REPLICA_STATE_STARTING,
    ReplicaState,
    ReplicaStatus,
)
from services.coordinator.fleet.registry import Registry
from services.coordinator.fleet.run_fleet import FAILURE_LEASES, Fleet
from services.coordinator.state.records import RoleFailure
from services.coordinator.state.store import AsyncStore, Store

LEASE = 6.0


@pytest.fixture
def registry(redis_url: str) -> Registry:
    store = AsyncStore(Store(redis_url))
    store.in_threads.take_over()
    return Registry(store, lease_seconds=LEASE, heartbeat_seconds=1.0, gpu_lease_seconds=60.0)


def says(registry: Registry, name: str, state: "ReplicaState.ValueType", *, refused: bool = False) -> None:
    registry.heartbeat(name, ReplicaStatus(state=state, run_id="run", detail="no disk", start_refused=refused))


async def test_a_role_fails_when_its_replicas_keep_failing_and_none_starts(registry: Registry) -> None:
    now = 1000.0
    for name in ("one", "two"):
        await registry.register(Registration(replica_id=name, role=ROLLOUT, address="127.0.0.1:9"))
        says(registry, name, REPLICA_STATE_FAILED)
    fleet = Fleet(registry, "run", REPLICA_ROLES, clock=lambda: now)
    assert fleet.failure() is None
    now += FAILURE_LEASES * LEASE + 1
    says(registry, "one", REPLICA_STATE_STARTING)  # such as loading a large model, or waiting for a GPU
    assert fleet.failure() is None
    now += 3600
    assert fleet.failure() is None
    says(registry, "one", REPLICA_STATE_FAILED)
    assert fleet.failure() == RoleFailure(ROLLOUT, "two", "rollout two failed: no disk")


async def test_a_role_fails_at_once_when_all_its_starts_are_refused(registry: Registry) -> None:
    for name in ("one", "two"):
        await registry.register(Registration(replica_id=name, role=ROLLOUT, address="127.0.0.1:9"))
        says(registry, name, REPLICA_STATE_FAILED, refused=name == "one")
    fleet = Fleet(registry, "run", REPLICA_ROLES, clock=lambda: 1000.0)
    assert fleet.failure() is None  # the other one may still start
    says(registry, "two", REPLICA_STATE_FAILED, refused=True)
    assert fleet.failure() == RoleFailure(ROLLOUT, "two", "rollout two failed: no disk")
