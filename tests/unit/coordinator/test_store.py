"""The coordinator's records in a real Redis."""

import pytest
import redis

from services.coordinator.state.records import Announcement, ReplicaRecord, RunRecord, WeightsRecord
from services.coordinator.state.store import ACTIVE, AnotherRunActive, RunIdTaken, Store, StoreFull, Superseded


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


def test_a_run_is_created_once_however_often_it_is_tried(redis_url: str) -> None:
    store = Store(redis_url)
    store.take_over()
    run = RunRecord(run_id="run", config_json="{}", folder="/run", request_id="request")
    another = RunRecord(run_id="another", config_json="{}", folder="/another")
    for _ in range(2):
        store.create_run(run)
    assert (store.active_run_id(), store.run_ids(), store.started_by("request")) == ("run", ["run"], run)
    assert store.run_times() == {"run": run.create_time.timestamp()}
    with pytest.raises(AnotherRunActive, match="run"):
        store.create_run(another)
    with pytest.raises(RunIdTaken):
        store.create_run(run.model_copy(update={"folder": "/elsewhere"}))
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", 1)
        try:
            store.create_run(run)
            client.delete(ACTIVE)
            with pytest.raises(StoreFull, match=r"is full \(maxmemory\)"):  # nobody waits for more memory
                store.create_run(another)
        finally:
            client.config_set("maxmemory", 0)
