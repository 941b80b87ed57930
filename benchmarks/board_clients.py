"""Board calls from asyncio: the client in threads, as services have it, beside redis.asyncio; and packers of commands.

`python -m benchmarks.board_clients`. Three calls, with 1, 16 and 256 in flight:

- "script": a script of the board gets a few hundred bytes (the lease of one group is renewed);
- "load 256 KB": a group's column is loaded and decoded;
- "write 256 KB": a slice of a column is written.

Clients: "threads" is the blocking board in asyncio.to_thread, as the coordinator had it. "asyncio" is
redis.asyncio with hiredis's parser; it packs commands in Python, because redis.asyncio has no other way. "asyncio, our
packer" is the same with relaxd's CommandPacker. Those two have as many connections as there are threads; they send what
the board sends and decode as it does, but retry nothing. "AsyncBoard" is the board's own face for the event loop, which
does. "sync" is the board in the only thread there is, one call after the other: what threads and asyncio add to. All
take turns in each round. Processor time of a call is that of the client's process and of Redis.

Then packers alone: relaxd's CommandPacker beside hiredis.pack_command and redis-py's in Python.
"""

import argparse
import asyncio
import functools
import statistics
import time
import timeit
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import hiredis
import numpy as np
import redis
import redis.asyncio
from redis.connection import PythonRespSerializer

from benchmarks.board import redis_server
from benchmarks.reporting import report
from relaxd.board import AsyncBoard, Board, Delivery, NewGroup, Stage, decode_columns
from relaxd.board.attempts import places
from relaxd.board.command_packing import CommandPacker
from relaxd.board.scripts import script_call
from relaxd.config import BoardConfig

IN_FLIGHT = (1, 16, 256)
SIZE = 256 * 1024
CALLS = {"script": 4096, "load 256 KB": 1024, "write 256 KB": 1024}
"""Calls in a measurement."""
THREADS = 64
"""As the coordinator had."""
SECONDS = 120.0
"""Deadline of a measurement."""
STAGES = [Stage("train", ("x",), ())]

Call = Callable[[], Awaitable[object]]


class Measured(NamedTuple):
    """Latencies of a call, and calls a second."""

    p50_ms: float
    p99_ms: float
    per_second: float
    client_us: float
    redis_us: float


class OurPackerConnection(redis.asyncio.Connection):
    """A connection with relaxd's packer."""

    packer = CommandPacker()

    def pack_command(self, *args: Any) -> list[Any]:
        return list(self.packer.pack(*args))

    def pack_commands(self, commands: Any) -> list[Any]:
        return [chunk for command in commands for chunk in self.packer.pack(*command)]


class Boards:
    """One group on a board, and the calls of each client for it."""

    def __init__(self, url: str, connections: int) -> None:
        self._url, self._connections = url, connections
        self.board = Board(url, "benchmark", STAGES, BoardConfig(lease_seconds=3600), timeout_seconds=30)
        self.board.create(term=1, groups_per_step=1, steps=1)
        self.board.set_gate(term=1, oldest_version=0, open=True)
        self._data = np.arange(SIZE // 8)
        self.board.publish(term=1, groups=[NewGroup("group-000001", {"x": self._data})])
        (self._held,) = self.board.take("train", "replica-1", count=1, block_seconds=1)
        self._write = ("SET", "written", self._data.tobytes(), "PX", 60_000)

    def sync(self) -> dict[str, Callable[[], object]]:
        """Return the board's own calls."""
        return {
            "script": lambda: self.board.renew("train", "replica-1", [self._held]),
            "load 256 KB": lambda: self.board.load([self._held], ["x"]),
            "write 256 KB": lambda: self.board._connection.write([self._write]),
        }

    def clients(self) -> dict[str, dict[str, Call]]:
        """Return the calls of each client, by the client's name."""
        sync = self.sync()

        async def here(function: Callable[[], object]) -> object:
            return function()

        return {
            "sync": {name: functools.partial(here, function) for name, function in sync.items()},
            "threads": {name: functools.partial(asyncio.to_thread, function) for name, function in sync.items()},
            "asyncio": self._asyncio(redis.asyncio.Connection),
            "asyncio, our packer": self._asyncio(OurPackerConnection),
            "AsyncBoard": self._async_board(),
        }

    def _async_board(self) -> dict[str, Call]:
        board = AsyncBoard(self._url, "benchmark", STAGES, BoardConfig(lease_seconds=3600), timeout_seconds=30)
        return {
            "script": lambda: board.renew("train", "replica-1", [self._held]),
            "load 256 KB": lambda: board.load([self._held], ["x"]),
            "write 256 KB": lambda: board._connection.write([self._write]),
        }

    def _asyncio(self, connection_class: Any) -> dict[str, Call]:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            self._url,
            connection_class=connection_class,
            max_connections=self._connections,
            timeout=SECONDS,
            protocol=2,
            socket_timeout=30,
            socket_connect_timeout=30,
        )
        client: Any = redis.asyncio.Redis(connection_pool=pool)
        held: Delivery = self._held
        renew = script_call(
            "renew", self.board.prefix, "train", "replica-1", held.group_id, held.entry_id, held.attempt
        )

        async def script() -> object:
            return {group_id.decode() for group_id in await client.execute_command(*renew)}

        async def load() -> object:
            place = places(self.board.prefix, held.pointers["@publish"], ["x"])["x"]
            async with client.pipeline(transaction=False) as pipe:
                pipe.execute_command("MGET", *place.keys)
                pipe.execute_command("SMISMEMBER", f"{self.board.prefix}open", held.group_id)
                found, _ = await pipe.execute()
            return decode_columns(found[0])["x"]

        async def write() -> object:
            return await client.execute_command(*self._write)

        return {"script": script, "load 256 KB": load, "write 256 KB": write}


async def measure(call: Call, calls: int, in_flight: int, server: redis.Redis) -> Measured:
    """Make calls, so many at a time."""
    seconds: list[float] = []
    left = iter(range(calls))

    async def caller() -> None:
        for _ in left:
            begun = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - begun)

    await asyncio.gather(*(call() for _ in range(in_flight)))  # makes connections and threads
    of_redis, of_client, begun = redis_seconds(server), time.process_time(), time.perf_counter()
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*(caller() for _ in range(in_flight)))
    taken, of_client = time.perf_counter() - begun, time.process_time() - of_client
    of_redis = redis_seconds(server) - of_redis
    p50, p99 = np.percentile(seconds, (50, 99))
    return Measured(1000 * p50, 1000 * p99, calls / taken, 1e6 * of_client / calls, 1e6 * of_redis / calls)


def redis_seconds(server: redis.Redis) -> float:
    """Return the processor time that Redis has taken."""
    facts: Any = server.info("cpu")
    return float(facts["used_cpu_user"] + facts["used_cpu_sys"])


async def measure_clients(url: str, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Return a row for each call, number in flight and client."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads))
    server = redis.Redis.from_url(url)
    server.flushall()
    clients = Boards(url, threads).clients()
    found: dict[tuple[str, int, str], list[Measured]] = {}
    for _ in range(rounds):
        for what, calls in CALLS.items():
            for in_flight in IN_FLIGHT:
                for client, its_calls in clients.items():
                    if client != "sync" or in_flight == 1:
                        measured = await measure(its_calls[what], calls, in_flight, server)
                        found.setdefault((what, in_flight, client), []).append(measured)
    rows = []
    for (what, in_flight, client), measured_ones in found.items():
        median = Measured(*(statistics.median(column) for column in zip(*measured_ones, strict=True)))
        rows.append(
            {
                "call": what,
                "in flight": in_flight,
                "client": client,
                "p50, ms": round(median.p50_ms, 2),
                "p99, ms": round(median.p99_ms, 2),
                "calls/s": round(median.per_second),
                "client's processor, µs": round(median.client_us),
                "Redis's, µs": round(median.redis_us),
            }
        )
    return rows


def commands() -> dict[str, tuple[Any, ...]]:
    """Return commands as the board sends them."""
    digest, prefix = "a" * 40, "relaxd:run:"
    payloads: list[Any] = ["MSET"]
    for index in range(256):
        payloads += [f"{prefix}columns:g{index}.0123456789ab{index:x}:4120", b"x" * 4120]
    return {
        "script of 250 bytes": ("EVALSHA", digest, 1, prefix, "rollout", "replica-1", *("group-000001", "1-1", 1) * 6),
        "MGET of 256 keys": ("MGET", *(f"{prefix}columns:g{index}.0123456789ab{index:x}:4120" for index in range(256))),
        "MSET of 256 x 4 KB": tuple(payloads),
        "SET of 256 KB": ("SET", f"{prefix}columns:g.0123456789ab:8:x:0", b"x" * SIZE, "NX", "PX", 60_000),
        "SET of 1 MB": ("SET", f"{prefix}columns:g.0123456789ab:8:x:0", b"x" * (1 << 20), "NX", "PX", 60_000),
    }


def measure_packers(rounds: int) -> dict[str, dict[str, float]]:
    """Return the microseconds that each packer takes for each command: the best of all rounds."""
    in_python = PythonRespSerializer(6000, lambda value: value if isinstance(value, bytes) else str(value).encode())
    packers: dict[str, Callable[..., object]] = {
        "ours": CommandPacker().pack,
        "hiredis": lambda *arguments: hiredis.pack_command(arguments),
        "redis-py": in_python.pack,
    }
    found: dict[str, dict[str, float]] = {}
    for name, command in commands().items():
        times: dict[str, list[float]] = {packer: [] for packer in packers}
        for _ in range(rounds):
            for packer, pack in packers.items():
                times[packer].append(timeit.timeit(functools.partial(pack, *command), number=20) / 20)
        found[name] = {packer: round(1e6 * min(seconds), 1) for packer, seconds in times.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is measured; the median counts")
    parser.add_argument("--threads", type=int, default=THREADS, help="threads of the executor")
    options = parser.parse_args()
    with redis_server(append_only=False) as url:
        rows = asyncio.run(measure_clients(url, options.rounds, options.threads))
    packers = measure_packers(20 * options.rounds)
    report("board_clients", rows, rounds=options.rounds, threads=options.threads, packers_us=packers)


if __name__ == "__main__":
    main()
