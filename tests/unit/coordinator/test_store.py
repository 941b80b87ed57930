"""The coordinator's records in a real Redis."""

import pytest
import redis

from services.coordinator.state.records import Announcement, ReplicaRecord, WeightsRecord
from services.coordinator.state.store import Store, Superseded


def test_a_full_redis_takes_what_a_coordinator_writes(redis_url: str) -> None:
    announced = Announcement(run_id="run", replica_id="trainer", term=1, version=7)
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("anything", 1)
            first, second = Store(redis_url), Store(redis_url)
            first.take_over()
            first.save_weights(WeightsRecord(announced=announced))
            first.save_replica("rollout-1", ReplicaRecord(registration_json="{}", registered_at=1.0))
            assert second.take_over() == first.term + 1
            assert second.weights().announced == announced
            assert second.replicas().keys() == {"rollout-1"}
            with pytest.raises(Superseded):
                first.save_weights(WeightsRecord())
        finally:
            client.config_set("maxmemory", 0)
