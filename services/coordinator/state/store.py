"""The coordinator's state in Redis, and its runs' boards. Every write is fenced by the coordinator's term."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import redis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from relaxd.board import AsyncBoard, Board, BoardUnavailable, stages_for
from relaxd.config import RunConfig
from relaxd.redis_client import (
    COORDINATOR,
    acknowledged,
    acknowledged_async,
    connect,
    connect_async,
    key_prefix,
    parse,
    passing,
    read,
    read_async,
)
from relaxd.redis_client.operations import (
    Asynchronous,
    Blocking,
    RedisOperation,
    Request,
    Send,
    ask,
    is_cluster_node,
    operation,
)
from relaxd.rpc.errors import Unavailable
from relaxd.rpc.leader_term import TERM_KEY
from services.coordinator.state.records import HealthRecord, ReplicaRecord, RunRecord, ScaleRecord, WeightsRecord

PREFIX = key_prefix(COORDINATOR)
RUNS = PREFIX + "runs"
REQUESTS = PREFIX + "start-requests"
"""Redis key of a hash: run id by the id of the StartRun request."""
DELETING = PREFIX + "deleting"
ACTIVE = PREFIX + "active"
REPLICAS = PREFIX + "replicas"
GPUS = PREFIX + "gpus"
WEIGHTS = PREFIX + "weights"
SCALING = PREFIX + "scaling"

SETTINGS: dict[str, Any] = {"protocol": 2, "decode_responses": True, "health_check_interval": 15}
MAX_BOARDS = 8
"""Maximum number of connected boards of runs that aren't active."""
READERS = ThreadPoolExecutor(8, thread_name_prefix="reader")
"""Threads for calls that only read boards and files. While Redis doesn't answer, each such call blocks a thread for
seconds; calls that replicas depend on, such as Register, must not wait for a thread."""
Result = TypeVar("Result")

BACKOFF, RETRIES = ExponentialBackoff(cap=0.2, base=0.02), 2
"""BACKOFF: pauses between redis-py's own retries, in seconds. RETRIES: maximum number of these retries."""

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
    """Redis doesn't answer the coordinator's store; a retry may succeed."""


class StoreFull(Unavailable):
    """Redis is full and accepts no new run."""


class Superseded(Unavailable):
    """A newer coordinator has taken over this Redis; this process must end."""


class RunIdTaken(Exception):
    """A run with this id exists already."""


class AnotherRunActive(Exception):
    """Only one run can be active; the message is the active run's id."""


def run_key(run_id: str) -> str:
    """Return the Redis key of a run's record."""
    return f"{PREFIX}run:{run_id}"


def health_key(run_id: str) -> str:
    """Return the Redis key of a run's health record."""
    return f"{PREFIX}health:{run_id}"


@dataclass
class _Leadership:
    """Tracks whether this coordinator is still the leader."""

    term: int = 0
    superseded: bool = False


class StoreOperations:
    """Operations on the coordinator's records, shared by Store and AsyncStore."""

    _leadership: _Leadership

    @property
    def term(self) -> int:
        """Term of this coordinator; 0 before `take_over`."""
        return self._leadership.term

    @property
    def superseded(self) -> bool:
        """True if a newer coordinator is known to have taken over this Redis."""
        return self._leadership.superseded

    @operation
    def is_cluster_node(self) -> RedisOperation[bool]:
        """Return True if this Redis is a node of a Redis Cluster."""
        return (yield from is_cluster_node())

    @operation
    def take_over(self) -> RedisOperation[int]:
        """Start a new term, which fences all older coordinators."""
        self._leadership.term = int((yield from self._script(_TAKE_OVER, [TERM_KEY])))
        return self.term

    @operation
    def check(self) -> RedisOperation[None]:
        """Raise Superseded if a newer coordinator has taken over."""
        yield from self._write([])

    @operation
    def create_run(self, run: RunRecord) -> RedisOperation[None]:
        """Create a run and make it the active one. The call may be repeated. Raises RunIdTaken, AnotherRunActive,
        StoreFull."""
        keys = [TERM_KEY, run_key(run.run_id), ACTIVE, RUNS, REQUESTS]
        created = run.create_time.timestamp()
        arguments: list[str | float] = [self.term, run.run_id, run.model_dump_json(), created, run.request_id]
        try:
            answer = yield from self._script(_CREATE, keys, *arguments)
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, redis.exceptions.OutOfMemoryError):
                raise
            if (yield from _run(run.run_id)) != run:  # else the answer to an earlier attempt was lost
                raise StoreFull(str(error)) from error
            return
        if answer == "EXISTS":
            raise RunIdTaken(run.run_id)
        if answer.startswith("ACTIVE "):
            raise AnotherRunActive(answer.removeprefix("ACTIVE "))
        self._check(answer)

    @operation
    def save_run(self, run: RunRecord) -> RedisOperation[None]:
        """Save a run's record. A run that has ended is no longer the active run."""
        commands: list[list[str]] = [["SET", run_key(run.run_id), run.model_dump_json()]]
        if run.phase.ended:
            commands.append(["DEL", ACTIVE])
        yield from self._write(commands)

    @operation
    def run(self, run_id: str) -> RedisOperation[RunRecord | None]:
        """Return a run's record; None if there is none."""
        return (yield from _run(run_id))

    @operation
    def started_by(self, request_id: str) -> RedisOperation[RunRecord | None]:
        """Return the record of the run that a StartRun request started; None if there is none."""
        run_id = yield from ask("HGET", REQUESTS, request_id)
        return (yield from _run(run_id)) if run_id else None

    @operation
    def run_ids(self) -> RedisOperation[list[str]]:
        """Return the ids of all runs, newest first."""
        return list((yield from ask("ZREVRANGE", RUNS, 0, -1)))

    @operation
    def run_times(self) -> RedisOperation[dict[str, float]]:
        """Return the Unix time at which each run was created, by run id, newest first."""
        found = yield from ask("ZREVRANGE", RUNS, 0, -1, "WITHSCORES")
        return dict(zip(found[::2], map(float, found[1::2]), strict=True))

    @operation
    def begin_delete(self, run_id: str, request_id: str = "") -> RedisOperation[None]:
        """Delete the records of a run and its StartRun request; its board still has to be deleted (see `deleting`)."""
        forgotten = [["ZREM", RUNS, run_id], ["HDEL", REQUESTS, request_id]]
        yield from self._write([["SADD", DELETING, run_id], *forgotten, ["DEL", run_key(run_id), health_key(run_id)]])

    @operation
    def end_delete(self, run_id: str) -> RedisOperation[None]:
        """Record that a deleted run's board is deleted, too."""
        yield from self._write([["SREM", DELETING, run_id]])

    @operation
    def deleting(self) -> RedisOperation[list[str]]:
        """Return the ids of deleted runs whose boards may still exist."""
        return sorted((yield from ask("SMEMBERS", DELETING)))

    @operation
    def active_run_id(self) -> RedisOperation[str | None]:
        """Return the id of the active run; None without one."""
        found: str | None = yield from ask("GET", ACTIVE)
        return found

    @operation
    def save_replica(self, replica_id: str, record: ReplicaRecord) -> RedisOperation[None]:
        """Save a replica's registration."""
        yield from self._write([["HSET", REPLICAS, replica_id, record.model_dump_json()]])

    @operation
    def remove_replicas(self, replica_ids: Sequence[str], gpu_uuids: Sequence[str]) -> RedisOperation[None]:
        """Delete registrations of replicas, and holder records of GPUs (`gpu_uuids`)."""
        removed = ((REPLICAS, replica_ids), (GPUS, gpu_uuids))
        yield from self._write([["HDEL", key, *fields] for key, fields in removed if fields])

    @operation
    def save_gpus(self, replica_id: str, held: Sequence[str], freed: Sequence[str]) -> RedisOperation[None]:
        """Save a replica as the holder of GPUs, and remove the holder of others. `held` and `freed`: holder records."""
        commands = [["HSET", GPUS, uuid, replica_id] for uuid in held]
        if freed:
            commands.append(["HDEL", GPUS, *freed])
        yield from self._write(commands)

    @operation
    def gpu_holders(self) -> RedisOperation[dict[str, str]]:
        """Return the ids of the replicas that hold GPUs, by holder record (a GPU's UUID and a suffix for the kind of
        lease)."""
        return dict((yield from ask("HGETALL", GPUS)))

    @operation
    def replicas(self) -> RedisOperation[dict[str, ReplicaRecord]]:
        """Return the registrations of all replicas, by replica id."""
        stored = yield from ask("HGETALL", REPLICAS)
        return {key: ReplicaRecord.model_validate_json(value) for key, value in stored.items()}

    @operation
    def save_weights(self, record: WeightsRecord) -> RedisOperation[None]:
        """Save the state of weight synchronisation."""
        yield from self._write([["SET", WEIGHTS, record.model_dump_json()]])

    @operation
    def weights(self) -> RedisOperation[WeightsRecord]:
        """Return the state of weight synchronisation."""
        text = yield from ask("GET", WEIGHTS)
        return WeightsRecord.model_validate_json(text) if text else WeightsRecord()

    @operation
    def save_scaling(self, record: ScaleRecord, forget: Sequence[str] = ()) -> RedisOperation[None]:
        """Save a scale request, and delete the requests `forget`."""
        commands = [["HSET", SCALING, record.request_id, record.model_dump_json()]]
        if forget:
            commands.append(["HDEL", SCALING, *forget])
        yield from self._write(commands)

    @operation
    def scaling(self) -> RedisOperation[list[ScaleRecord]]:
        """Return all scale requests, oldest first."""
        stored = yield from ask("HVALS", SCALING)
        return sorted(map(ScaleRecord.model_validate_json, stored), key=lambda record: record.create_time)

    @operation
    def save_health(self, run_id: str, record: HealthRecord) -> RedisOperation[None]:
        """Save a run's health record."""
        yield from self._write([["SET", health_key(run_id), record.model_dump_json()]])

    @operation
    def health(self, run_id: str) -> RedisOperation[HealthRecord]:
        """Return a run's health record; an empty one if there is none."""
        text = yield from ask("GET", health_key(run_id))
        return HealthRecord.model_validate_json(text) if text else HealthRecord()

    def _write(self, commands: list[list[str]]) -> RedisOperation[None]:
        # All keys are named: while a cluster moves them to another node, it must refuse the script as a whole.
        keys = [TERM_KEY, *(command[1] for command in commands)]
        self._check((yield from self._script(_GUARDED, keys, self.term, json.dumps(commands))))

    def _script(self, text: str, keys: Sequence[str], *arguments: Any) -> RedisOperation[Any]:
        """Run a Lua script and return its reply. Its writes survive a lost Redis primary if the URL has
        `wait_replicas`."""
        (reply,) = yield Send([("EVAL", text, len(keys), *keys, *arguments)], how="write")
        return reply

    def _check(self, answer: str) -> None:
        if answer != "OK":
            self._leadership.superseded = True
            raise Superseded(f"a newer coordinator has taken over this Redis (this one has term {self.term})")


class Store(StoreOperations, Blocking):
    """Reads and writes the coordinator's records in Redis. Blocks, and is thread-safe."""

    def __init__(self, redis_url: str, *, timeout_seconds: float = 3.0) -> None:
        self.redis_url = redis_url
        self.timeout_seconds = timeout_seconds
        self._leadership = _Leadership()
        self._replicas = parse(redis_url).wait_replicas
        settings = {**SETTINGS, "retry": Retry(BACKOFF, RETRIES)}
        self._redis = connect(redis_url, tag=COORDINATOR, seconds=timeout_seconds, **settings)

    def close(self) -> None:
        """Close all connections to Redis."""
        self._redis.close()

    def _send(self, request: Request) -> list[Any]:
        assert isinstance(request, Send)
        with _typed_errors():
            if request.how == "write":
                seconds = self.timeout_seconds / 2
                return acknowledged(self._redis, request.commands, replicas=self._replicas, seconds=seconds)
            return read(self._redis, request.commands)


class AsyncStore(StoreOperations, Asynchronous):
    """Reads and writes the coordinator's records in Redis, from one event loop. Shares the term of `in_threads`, a
    blocking store that has taken over."""

    def __init__(self, store: Store) -> None:
        self.in_threads = store
        self._leadership = store._leadership
        self._replicas = store._replicas
        self._seconds = store.timeout_seconds
        settings = {**SETTINGS, "retry": AsyncRetry(BACKOFF, RETRIES)}
        self._redis = connect_async(store.redis_url, tag=COORDINATOR, seconds=self._seconds, **settings)

    async def close(self) -> None:
        """Close all connections to Redis, including those of `in_threads`."""
        await self._redis.aclose()
        self.in_threads.close()

    async def _send(self, request: Request) -> list[Any]:
        assert isinstance(request, Send)
        with _typed_errors():
            if request.how == "write":
                how: dict[str, Any] = {"replicas": self._replicas, "seconds": self._seconds / 2}
                return await acknowledged_async(self._redis, request.commands, **how)
            return await read_async(self._redis, request.commands)


def _run(run_id: str) -> RedisOperation[RunRecord | None]:
    text = yield from ask("GET", run_key(run_id))
    return RunRecord.model_validate_json(text) if text else None


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turn errors of redis-py into StoreUnavailable if a retry may succeed."""
    try:
        yield
    except redis.RedisError as error:
        if reason := passing(error):
            raise StoreUnavailable(f"Redis {reason}") from error
        raise


class RunBoard(AsyncBoard):
    """A run's board for the event loop; `in_threads` is the same board for use in threads.

    Reads that may parse megabytes, such as the plans of many steps, run in threads.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        """Takes the arguments of Board."""
        super().__init__(*arguments, **settings)
        self.in_threads = Board(*arguments, **settings)
        """Board for use in threads. It connects to Redis when first used."""

    async def close(self) -> None:
        """Close all connections to Redis. A later read connects again."""
        await super().close()
        self.in_threads.close()


class RunBoards:
    """Connected boards of the active run and of the most recently requested runs. Lives in the event loop."""

    def __init__(self, redis_url: str) -> None:
        self._redis_url = redis_url
        self._boards: dict[str, RunBoard] = {}
        """Connected boards by run id, the most recently used last."""
        self._closings: set[asyncio.Task[None]] = set()

    def open(self, record: RunRecord, *, active: str | None) -> RunBoard:
        """Return the board of a run, and close boards beyond MAX_BOARDS; `active`: id of the active run."""
        board = self._boards.pop(record.run_id, None)
        if board is None:
            config = RunConfig.model_validate_json(record.config_json)
            board = RunBoard(self._redis_url, record.run_id, stages_for(config), config.board)
        self.keep(board)
        for run_id in [run_id for run_id in self._boards if run_id != active][:-MAX_BOARDS]:
            closing = asyncio.create_task(self._boards.pop(run_id).close())
            self._closings.add(closing)
            closing.add_done_callback(self._closings.discard)
        return board

    def keep(self, board: RunBoard) -> None:
        """Keep a board in the cache, as the most recently used."""
        self._boards[board.run_id] = board

    def forget(self, run_id: str) -> None:
        """Remove a run's board from the cache without closing it."""
        self._boards.pop(run_id, None)

    async def close(self) -> None:
        """Close all cached boards."""
        for board in self._boards.values():
            await board.close()


async def read_board(reading: Awaitable[Result]) -> Result:
    """Await an operation that reads a board. Raises Unavailable if Redis doesn't answer."""
    try:
        return await reading
    except BoardUnavailable as error:
        raise Unavailable(str(error)) from error


async def read_in_thread(operation: Callable[..., Result], *arguments: Any) -> Result:
    """In a thread, run a function that reads a board and a run's files. Raises Unavailable if Redis doesn't answer."""
    return await read_board(asyncio.get_running_loop().run_in_executor(READERS, operation, *arguments))
