"""The coordinator's state in Redis. Every write is fenced by the coordinator's term."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from relaxd.redis_client import COORDINATOR, acknowledged, connect, is_cluster_node, key_prefix, parse, passing
from relaxd.rpc.errors import Unavailable
from relaxd.rpc.terms import TERM_KEY
from services.coordinator.state.health_records import HealthRecord
from services.coordinator.state.records import ReplicaRecord, RunRecord, WeightsRecord
from services.coordinator.state.scale_records import ScaleRecord

PREFIX = key_prefix(COORDINATOR)
RUNS = PREFIX + "runs"
REQUESTS = PREFIX + "start-requests"
"""Run ids by the id of the StartRun request."""
DELETING = PREFIX + "deleting"
ACTIVE = PREFIX + "active"
REPLICAS = PREFIX + "replicas"
GPUS = PREFIX + "gpus"
WEIGHTS = PREFIX + "weights"
SCALING = PREFIX + "scaling"

# Records are few, small and replaced often. A full Redis must accept them, because only a working coordinator frees
# memory, step by step. A new run may be refused.
_TAKE_OVER = """#!lua flags=allow-oom
return redis.call('INCR', KEYS[1])
"""

# KEYS: term, those of the commands. ARGV: the writer's term, commands as JSON.
_GUARDED = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'FENCED' end
for _, command in ipairs(cjson.decode(ARGV[2])) do redis.call(unpack(command)) end
return 'OK'
"""

# KEYS: term, the run, active, runs, requests. ARGV: the writer's term, run id, record, creation time, request id or ''.
_CREATE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'FENCED' end
local stored = redis.call('GET', KEYS[2])
local active = redis.call('GET', KEYS[3])
if stored == ARGV[3] and active == ARGV[2] then return 'OK' end  -- the answer to the first attempt was lost
if stored then return 'EXISTS' end
if active then return 'ACTIVE ' .. active end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[2])
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[2])
if ARGV[5] ~= '' then redis.call('HSET', KEYS[5], ARGV[5], ARGV[2]) end
return 'OK'
"""


class StoreUnavailable(Unavailable):
    """Redis doesn't answer."""


class StoreFull(Unavailable):
    """Redis is full and takes no new run."""


class Superseded(Unavailable):
    """A newer coordinator has taken over; this one must end."""


class RunIdTaken(Exception):
    """A run of this id exists."""


class AnotherRunActive(Exception):
    """One run is active at a time; the message is the active run's id."""


def run_key(run_id: str) -> str:
    """Key of a run's record."""
    return f"{PREFIX}run:{run_id}"


def health_key(run_id: str) -> str:
    """Key of a run's health record."""
    return f"{PREFIX}health:{run_id}"


class Store:
    """Reads and writes records. Synchronous and thread-safe; call it from threads."""

    def __init__(self, redis_url: str, *, timeout_seconds: float = 3.0) -> None:
        self._replicas = parse(redis_url).wait_replicas
        self._seconds = timeout_seconds / 2
        self._redis = connect(
            redis_url,
            tag=COORDINATOR,
            decode_responses=True,
            seconds=timeout_seconds,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
            health_check_interval=15,
        )
        self.term = 0
        self.superseded = False
        """A newer coordinator has taken over this Redis."""

    def is_cluster_node(self) -> bool:
        """Return whether this Redis is a node of a Redis Cluster."""
        return bool(self._call(lambda: is_cluster_node(self._redis)))

    def take_over(self) -> int:
        """Start a new term, which fences all older coordinators."""
        self.term = int(self._script(_TAKE_OVER, [TERM_KEY]))
        return self.term

    def check(self) -> None:
        """Raise Superseded if a newer coordinator has taken over."""
        self._write([])

    def create_run(self, run: RunRecord) -> None:
        """Create a run as the active one; may be repeated. Raises RunIdTaken, AnotherRunActive, StoreFull."""
        keys = [TERM_KEY, run_key(run.run_id), ACTIVE, RUNS, REQUESTS]
        created = run.create_time.timestamp()
        arguments: list[str | float] = [self.term, run.run_id, run.model_dump_json(), created, run.request_id]
        try:
            answer = self._script(_CREATE, keys, *arguments)
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, redis.exceptions.OutOfMemoryError):
                raise
            if self.run(run.run_id) != run:  # else the answer to an earlier attempt was lost
                raise StoreFull(str(error)) from error
            return
        if answer == "EXISTS":
            raise RunIdTaken(run.run_id)
        if answer.startswith("ACTIVE "):
            raise AnotherRunActive(answer.removeprefix("ACTIVE "))
        self._check(answer)

    def save_run(self, run: RunRecord) -> None:
        """Save a run's record; an ended run is no longer active."""
        commands: list[list[str]] = [["SET", run_key(run.run_id), run.model_dump_json()]]
        if run.phase.ended:
            commands.append(["DEL", ACTIVE])
        self._write(commands)

    def run(self, run_id: str) -> RunRecord | None:
        """Return a run's record."""
        text = self._call(lambda: self._redis.get(run_key(run_id)))
        return RunRecord.model_validate_json(text) if text else None

    def started_by(self, request_id: str) -> RunRecord | None:
        """Return the run that a StartRun request started."""
        run_id = self._call(lambda: self._redis.hget(REQUESTS, request_id))
        return self.run(run_id) if run_id else None

    def run_ids(self) -> list[str]:
        """Return the ids of all runs, newest first."""
        return list(self.run_times())

    def run_times(self) -> dict[str, float]:
        """Return the Unix times at which all runs were created, by run id, newest first."""
        return dict(self._call(lambda: self._redis.zrevrange(RUNS, 0, -1, withscores=True)))

    def begin_delete(self, run_id: str, request_id: str = "") -> None:
        """Delete the records of a run and its StartRun request; its board is still to be deleted (see `deleting`)."""
        forgotten = [["ZREM", RUNS, run_id], ["HDEL", REQUESTS, request_id]]
        self._write([["SADD", DELETING, run_id], *forgotten, ["DEL", run_key(run_id), health_key(run_id)]])

    def end_delete(self, run_id: str) -> None:
        """Record that a run's board is deleted."""
        self._write([["SREM", DELETING, run_id]])

    def deleting(self) -> list[str]:
        """Return the deleted runs whose boards may still exist."""
        return sorted(self._call(lambda: self._redis.smembers(DELETING)))

    def active_run_id(self) -> str | None:
        """Return the id of the active run."""
        return self._call(lambda: self._redis.get(ACTIVE))

    def save_replica(self, replica_id: str, record: ReplicaRecord) -> None:
        """Save a registration."""
        self._write([["HSET", REPLICAS, replica_id, record.model_dump_json()]])

    def remove_replicas(self, replica_ids: Sequence[str], gpu_uuids: Sequence[str]) -> None:
        """Delete registrations, and the holders of these GPUs."""
        removed = ((REPLICAS, replica_ids), (GPUS, gpu_uuids))
        self._write([["HDEL", key, *fields] for key, fields in removed if fields])

    def save_gpus(self, replica_id: str, held: Sequence[str], freed: Sequence[str]) -> None:
        """Save a replica as holder of GPUs, and free others."""
        commands = [["HSET", GPUS, uuid, replica_id] for uuid in held]
        if freed:
            commands.append(["HDEL", GPUS, *freed])
        self._write(commands)

    def gpu_holders(self) -> dict[str, str]:
        """Return replica ids by the UUID of the GPU that they hold."""
        return dict(self._call(lambda: self._redis.hgetall(GPUS)))

    def replicas(self) -> dict[str, ReplicaRecord]:
        """Return all registrations by replica id."""
        stored = self._call(lambda: self._redis.hgetall(REPLICAS))
        return {key: ReplicaRecord.model_validate_json(value) for key, value in stored.items()}

    def save_weights(self, record: WeightsRecord) -> None:
        """Save the state of weight synchronisation."""
        self._write([["SET", WEIGHTS, record.model_dump_json()]])

    def weights(self) -> WeightsRecord:
        """Return the state of weight synchronisation."""
        text = self._call(lambda: self._redis.get(WEIGHTS))
        return WeightsRecord.model_validate_json(text) if text else WeightsRecord()

    def save_scaling(self, record: ScaleRecord, forget: Sequence[str] = ()) -> None:
        """Save a scale request and delete others."""
        commands = [["HSET", SCALING, record.request_id, record.model_dump_json()]]
        if forget:
            commands.append(["HDEL", SCALING, *forget])
        self._write(commands)

    def scaling(self) -> list[ScaleRecord]:
        """Return all scale requests, oldest first."""
        stored = self._call(lambda: self._redis.hvals(SCALING))
        return sorted(map(ScaleRecord.model_validate_json, stored), key=lambda record: record.create_time)

    def save_health(self, run_id: str, record: HealthRecord) -> None:
        """Save a run's health record."""
        self._write([["SET", health_key(run_id), record.model_dump_json()]])

    def health(self, run_id: str) -> HealthRecord:
        """Return a run's health record."""
        text = self._call(lambda: self._redis.get(health_key(run_id)))
        return HealthRecord.model_validate_json(text) if text else HealthRecord()

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def _write(self, commands: list[list[str]]) -> None:
        # All keys are named: while a cluster moves them to another node, it must refuse the script as a whole.
        keys = [TERM_KEY, *(command[1] for command in commands)]
        self._check(self._script(_GUARDED, keys, self.term, json.dumps(commands)))

    def _script(self, text: str, keys: Sequence[str], *arguments: Any) -> Any:
        """Run a script; what it wrote survives the primary, if the URL has `wait_replicas`."""
        how: dict[str, Any] = {"replicas": self._replicas, "seconds": self._seconds}
        command = ("EVAL", text, len(keys), *keys, *arguments)
        return self._call(lambda: acknowledged(self._redis, [command], **how))[0]

    def _check(self, answer: str) -> None:
        if answer != "OK":
            self.superseded = True
            raise Superseded(f"a newer coordinator has taken over this Redis (this one has term {self.term})")

    @staticmethod
    def _call(operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except redis.RedisError as error:
            if reason := passing(error):
                raise StoreUnavailable(f"Redis {reason}") from error
            raise
