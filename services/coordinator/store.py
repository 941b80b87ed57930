"""The coordinator's state in Redis. Every write carries the coordinator's epoch: an older coordinator that wakes up
again changes nothing."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from relaxd.board import passing
from relaxd.rpc.epochs import EPOCH_KEY
from relaxd.rpc.errors import Unavailable
from services.coordinator.health_records import HealthRecord
from services.coordinator.records import ReplicaRecord, RunRecord, WeightsRecord
from services.coordinator.scale_records import ScaleRecord

PREFIX = "relaxd:coordinator:"
RUNS = PREFIX + "runs"
DELETING = PREFIX + "deleting"
ACTIVE = PREFIX + "active"
REPLICAS = PREFIX + "replicas"
GPUS = PREFIX + "gpus"
WEIGHTS = PREFIX + "weights"
SCALING = PREFIX + "scaling"

# Records of a run and its replicas are few, small, and replaced over and over: a full Redis must take them, for what
# makes room in it, the steps, needs a coordinator. A new run may be refused.
_TAKE_OVER = """#!lua flags=allow-oom
return redis.call('INCR', KEYS[1])
"""

# KEYS: epoch. ARGV: the writer's epoch, commands as JSON.
_GUARDED = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'FENCED' end
for _, command in ipairs(cjson.decode(ARGV[2])) do redis.call(unpack(command)) end
return 'OK'
"""

# KEYS: epoch, the run, active, runs. ARGV: the writer's epoch, run id, record, creation time.
_CREATE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 'FENCED' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'EXISTS' end
local active = redis.call('GET', KEYS[3])
if active then return 'ACTIVE ' .. active end
redis.call('SET', KEYS[2], ARGV[3])
redis.call('SET', KEYS[3], ARGV[2])
redis.call('ZADD', KEYS[4], ARGV[4], ARGV[2])
return 'OK'
"""


class StoreUnavailable(Unavailable):
    """Redis doesn't answer; a caller is told so."""


class Superseded(Unavailable):
    """A newer coordinator has taken over; this one must end."""


class RunIdTaken(Exception):
    """A run of this id exists."""


class AnotherRunActive(Exception):
    """One run is active at a time; the message is the active run's id."""


def run_key(run_id: str) -> str:
    """Key of a run's record."""
    return f"relaxd:{run_id}:run"


def health_key(run_id: str) -> str:
    """Key of what is kept of a run's health."""
    return f"relaxd:{run_id}:health"


class Store:
    """Reads and writes records. Synchronous and thread-safe; call it from threads."""

    def __init__(self, redis_url: str, *, timeout_seconds: float = 3.0) -> None:
        self._redis = redis.Redis.from_url(
            redis_url,
            decode_responses=True,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), retries=2),
            health_check_interval=15,
        )
        self._take_over = self._redis.register_script(_TAKE_OVER)
        self._guarded = self._redis.register_script(_GUARDED)
        self._create = self._redis.register_script(_CREATE)
        self.epoch = 0
        self.superseded = False
        """A newer coordinator works on this Redis."""

    def take_over(self) -> int:
        """Begin a new epoch: from now on every older coordinator is refused."""
        self.epoch = int(self._call(lambda: self._take_over(keys=[EPOCH_KEY])))
        return self.epoch

    def check(self) -> None:
        """Raise Superseded: a newer coordinator works on this Redis."""
        self._write([])

    def create_run(self, run: RunRecord) -> None:
        """Make a run known and active. Raises RunIdTaken, AnotherRunActive."""
        keys = [EPOCH_KEY, run_key(run.run_id), ACTIVE, RUNS]
        arguments: list[str | float] = [self.epoch, run.run_id, run.model_dump_json(), run.create_time.timestamp()]
        answer = self._call(lambda: self._create(keys=keys, args=arguments))
        if answer == "EXISTS":
            raise RunIdTaken(run.run_id)
        if answer.startswith("ACTIVE "):
            raise AnotherRunActive(answer.removeprefix("ACTIVE "))
        self._check(answer)

    def save_run(self, run: RunRecord) -> None:
        """Replace a run's record; a run that has ended is not active any more."""
        commands: list[list[str]] = [["SET", run_key(run.run_id), run.model_dump_json()]]
        if run.phase.ended:
            commands.append(["DEL", ACTIVE])
        self._write(commands)

    def run(self, run_id: str) -> RunRecord | None:
        """A run's record."""
        text = self._call(lambda: self._redis.get(run_key(run_id)))
        return RunRecord.model_validate_json(text) if text else None

    def run_ids(self) -> list[str]:
        """Ids of all runs, newest first."""
        return list(self._call(lambda: self._redis.zrevrange(RUNS, 0, -1)))

    def begin_delete(self, run_id: str) -> None:
        """Forget a run. What it has on the board is still to be deleted (see `deleting`)."""
        self._write([["SADD", DELETING, run_id], ["ZREM", RUNS, run_id], ["DEL", run_key(run_id), health_key(run_id)]])

    def end_delete(self, run_id: str) -> None:
        """Nothing is left of a run on the board."""
        self._write([["SREM", DELETING, run_id]])

    def deleting(self) -> list[str]:
        """Runs that are forgotten and may still have something on the board."""
        return sorted(self._call(lambda: self._redis.smembers(DELETING)))

    def active_run_id(self) -> str | None:
        """Id of the active run."""
        return self._call(lambda: self._redis.get(ACTIVE))

    def save_replica(self, replica_id: str, record: ReplicaRecord) -> None:
        """Remember a registration."""
        self._write([["HSET", REPLICAS, replica_id, record.model_dump_json()]])

    def remove_replicas(self, replica_ids: Sequence[str], gpu_uuids: Sequence[str]) -> None:
        """Forget registrations, and that they held these GPUs."""
        removed = ((REPLICAS, replica_ids), (GPUS, gpu_uuids))
        self._write([["HDEL", key, *fields] for key, fields in removed if fields])

    def save_gpus(self, replica_id: str, held: Sequence[str], freed: Sequence[str]) -> None:
        """Remember that a replica holds GPUs, and has given back others."""
        commands = [["HSET", GPUS, uuid, replica_id] for uuid in held]
        if freed:
            commands.append(["HDEL", GPUS, *freed])
        self._write(commands)

    def gpu_holders(self) -> dict[str, str]:
        """Which replica holds a GPU, by UUID."""
        return dict(self._call(lambda: self._redis.hgetall(GPUS)))

    def replicas(self) -> dict[str, ReplicaRecord]:
        """All registrations by replica id."""
        stored = self._call(lambda: self._redis.hgetall(REPLICAS))
        return {key: ReplicaRecord.model_validate_json(value) for key, value in stored.items()}

    def save_weights(self, record: WeightsRecord) -> None:
        """Remember what weight synchronisation is about to do or has done."""
        self._write([["SET", WEIGHTS, record.model_dump_json()]])

    def weights(self) -> WeightsRecord:
        """The state of weight synchronisation."""
        text = self._call(lambda: self._redis.get(WEIGHTS))
        return WeightsRecord.model_validate_json(text) if text else WeightsRecord()

    def save_scaling(self, record: ScaleRecord, forget: Sequence[str] = ()) -> None:
        """Remember how far a scale request is, and forget others."""
        commands = [["HSET", SCALING, record.request_id, record.model_dump_json()]]
        if forget:
            commands.append(["HDEL", SCALING, *forget])
        self._write(commands)

    def scaling(self) -> list[ScaleRecord]:
        """All scale requests, oldest first."""
        stored = self._call(lambda: self._redis.hvals(SCALING))
        return sorted(map(ScaleRecord.model_validate_json, stored), key=lambda record: record.create_time)

    def save_health(self, run_id: str, record: HealthRecord) -> None:
        """Remember how well a run's parts are, and what is done about it."""
        self._write([["SET", health_key(run_id), record.model_dump_json()]])

    def health(self, run_id: str) -> HealthRecord:
        """How well a run's parts are."""
        text = self._call(lambda: self._redis.get(health_key(run_id)))
        return HealthRecord.model_validate_json(text) if text else HealthRecord()

    def close(self) -> None:
        """Close all connections."""
        self._redis.close()

    def _write(self, commands: list[list[str]]) -> None:
        self._check(self._call(lambda: self._guarded(keys=[EPOCH_KEY], args=[self.epoch, json.dumps(commands)])))

    def _check(self, answer: str) -> None:
        if answer != "OK":
            self.superseded = True
            raise Superseded(f"a newer coordinator works on this Redis (this one has epoch {self.epoch})")

    @staticmethod
    def _call(operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except redis.RedisError as error:
            if why := passing(error):
                raise StoreUnavailable(f"Redis {why}") from error
            raise
